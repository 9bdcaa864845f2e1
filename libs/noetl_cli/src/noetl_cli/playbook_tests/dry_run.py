"""One execution in memory: the broker's own decisions, the worker's own rendering, mocked tools.

    Start ─> accept ─> follow ─> command.issued ─> Names, Pipeline, mock ─> Done | Failed ─┐
               ^                                                                           │
               └───────────────────────────────────────────────────────────────────────────┘

Nothing is stored and no time passes: a delay is skipped, a wait ends when nothing else is left to
do. Commands are performed in the order in which they were issued.
"""

import itertools
from collections import deque
from typing import Any

import msgspec

from noetl_broker.accept import ExecutionMessage, accept
from noetl_cli.playbook_tests.command import Call, Command
from noetl_cli.playbook_tests.mocks import Mocks, TestFailedError
from noetl_cli.playbook_tests.results import Results
from noetl_cli.playbook_tests.specification import SignalGiven
from noetl_core.blob import ResultStore, document_of
from noetl_core.domain.brief import Brief, brief_for, decode_brief, encode_brief
from noetl_core.domain.decide import Recorded, follow
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.events import CommandIssued, Event, StepEntered
from noetl_core.domain.ids import (
    CatalogId,
    EventId,
    ExecutionId,
    RefId,
    ShardId,
    StepName,
    WorkerId,
)
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.result_view import value_of
from noetl_core.domain.snowflake import EPOCH_MS, Snowflake
from noetl_core.domain.state import ExecutionState
from noetl_core.domain.timers import wait_timer
from noetl_core.store.command import Leased
from noetl_core.wire import messages
from noetl_core.wire.messages import Claimed, Done, Due, Failed, Parked, Partial, Start, Stored
from noetl_worker.persist import persist, persist_chunk, persist_parked
from noetl_worker.pipeline import Ended
from noetl_worker.plan import plan_of

COMMANDS_MAX = 10_000

_EXECUTION = ExecutionId(1)
_WORKER = WorkerId("test")
_CATALOG = CatalogId(1)
_STARTED_MS = EPOCH_MS + 86_400_000


class DryRun:
    """Raises TestFailedError from `run` where the test does not say enough to go on."""

    def __init__(self, playbook: Playbook, mocks: Mocks) -> None:
        self.playbook = playbook
        self.state = ExecutionState(execution_id=_EXECUTION)
        self.path: list[str] = []
        self.calls: list[Call] = []
        self.performed: list[StepName] = []
        """The step of every command that was performed."""
        self._mocks = mocks
        self._plans = {name: plan_of(playbook, step) for name, step in playbook.steps.items()}
        self._results = Results()
        self._store = ResultStore()
        self._queue: deque[tuple[CommandIssued, Brief]] = deque()
        self._mint = Snowflake(node=0, now_ms=lambda: _STARTED_MS).mint

    async def run(self, payload: dict[str, Any], signals: list[SignalGiven]) -> None:
        stored = await self._stored("payload", payload) if payload else None
        start = Start(
            execution_id=_EXECUTION, catalog_id=_CATALOG, path="test", version=1, payload=stored
        )
        self._take(start, stored)
        for number, signal in enumerate(signals, 1):
            await self._signal(number, signal)
        while not self.state.is_terminal:
            if self._queue:
                await self._perform(*self._queue.popleft())
            else:
                self._let_time_pass()

    def result_of(self, step: str) -> Any:
        """What a step has given the last time; None for nothing."""
        known = self.state.steps.get(StepName(step))
        if known is None or known.result is None or known.result.reference is None:
            return None
        return value_of(self._results.document(known.result.reference))

    async def _signal(self, number: int, signal: SignalGiven) -> None:
        data = None
        if signal.data is not None:
            data = await self._stored(f"signal {number}", signal.data)
        message = messages.Signal(
            execution_id=_EXECUTION,
            signal_id=number,
            name=signal.name,
            approved=signal.approved,
            by=signal.by,
            data=data,
        )
        self._take(message, data)

    def _let_time_pass(self) -> None:
        """Nothing is left to do but to wait."""
        parked = {name: c.parked for name, c in self.state.commands.items() if c.parked}
        timed = [(p.until_ms, name) for name, p in parked.items() if p.until_ms is not None]
        if timed:
            _, first = min(timed)
            self._take(Due(execution_id=_EXECUTION, timer=wait_timer(first)))
            return
        waited_for = sorted({p.signal for p in parked.values()})
        assert waited_for, self.state
        raise TestFailedError(
            f"the execution waits for `{waited_for[0]}`, which nobody sends: "
            f"add `signals: [{{name: {waited_for[0]}}}]`, or a mock for the step"
        )

    async def _stored(self, name: str, document: Any) -> Stored:
        return await self._store.put(_EXECUTION, name, document)

    def _take(self, message: ExecutionMessage, stored: Stored | None = None) -> None:
        event_id = EventId(self._mint())
        fact = accept(self.state, message, event_id)
        if fact is None:
            return
        if stored is not None:
            self._results.keep(RefId(event_id), document_of(stored))
        ids = itertools.chain((event_id,), iter(self._mint, None))
        for item in follow(self.playbook, self.state, fact, self._results.known, ids):
            if isinstance(item, ReferenceNeeded):
                self._results.load(item)
            else:
                self._record(item)

    def _record(self, item: Recorded) -> None:
        self._results.record(item, has_pages=self._has_pages(item.event))
        match item.event.fact:
            case StepEntered() as fact:
                self.path.append(fact.step)
            case CommandIssued() as fact:
                self._queue.append((fact, self._brief(fact)))
            case _:
                pass

    def _has_pages(self, event: Event) -> bool:
        step = getattr(event.fact, "step", None)
        return step is not None and self.playbook.steps[step].retry.on_success is not None

    def _brief(self, fact: CommandIssued) -> Brief:
        while True:
            try:
                brief = brief_for(self.playbook, self.state, fact, self._results.known)
            except ReferenceNeeded as needed:
                self._results.load(needed)
                continue
            # Through its bytes: what happens later must not show in it.
            return decode_brief(encode_brief(brief))

    async def _perform(self, fact: CommandIssued, brief: Brief) -> None:
        if fact.command_id not in self.state.commands:
            return  # its step was aborted meanwhile
        if len(self.performed) == COMMANDS_MAX:
            raise TestFailedError(f"more than {COMMANDS_MAX} commands: does it ever end?")
        self.performed.append(fact.step)
        self._take(Claimed(execution_id=_EXECUTION, command_id=fact.command_id, worker_id=_WORKER))
        leased = Leased(
            _EXECUTION, fact.command_id, ShardId(0), fact.step, fact.attempt, fact.pool, b""
        )
        command = Command(
            self._plans[fact.step], brief, leased, self._mocks, self._results, self.calls
        )
        ended = await command.run()
        chunks = await self._send_chunks(command, brief)
        message = await self._message(command, ended, chunks)
        self._take(message, message.payload if isinstance(message, Parked) else message.stored)

    async def _send_chunks(self, command: Command, brief: Brief) -> int:
        plan, count = command.plan, brief.chunks
        for chunk in command.chunks if plan.is_streamed else ():
            message: Partial = await persist_chunk(
                self._store, command.leased, _WORKER, plan, chunk, count
            )
            self._take(message, message.stored)
            count += 1
        return count

    async def _message(self, command: Command, ended: Ended, chunks: int) -> Done | Failed | Parked:
        plan, leased, names = command.plan, command.leased, command.names
        if ended.parked is not None:
            return await persist_parked(self._store, leased, _WORKER, plan, ended.parked, names)
        message = await persist(
            self._store, leased, _WORKER, plan, ended, names, 0.0, chunks=chunks
        )
        if [task.task.kind for task in plan.tasks] == ["playbook"]:
            status = "COMPLETED" if isinstance(message, Done) else "FAILED"
            child = {"execution_id": str(_EXECUTION + 1), "execution_status": status}
            message = msgspec.structs.replace(message, context={**message.context, **child})
        return message
