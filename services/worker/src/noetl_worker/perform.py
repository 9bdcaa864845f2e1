"""perform: one command from its brief to the message that says how it ended.

Crash analysis. We die
- after the lease: nothing was said; the lease runs out and the broker issues the next attempt.
- while the tool runs: the same. The tool's effects may have happened; `idempotency_key` is the
  same in the next attempt, for targets that can use it.
- after the tool, before the message is out: the same. A large result lies in its tier under
  the name of the command, referred to by nobody; it goes with its execution.
- after the message is out: the broker records it. The row is gone, nothing is left to do.
- after we have found out what a command waits for (a child, a moment, a person) and before that is
  recorded: nothing waits yet and no child was started, because the broker starts it in the commit
  that records `command.parked`. The next attempt asks the catalog again and counts `seconds` anew.
- after that message is out: the command waits without us, and our end changes nothing.
- between two chunks of a streamed result: see chunks.py. After the claim of a frame: see cursor.py.
- after the sink, before the message is out: the next attempt runs the tool again and comes to the
  sink again; the sink knows what it has written by the key of the command.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from noetl_core.blob import ReferenceNotAvailableError, ResultStore
from noetl_core.domain.brief import Brief, decode_brief
from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import NotFoundError, RejectedError, ToolError
from noetl_core.domain.ids import ExecutionId, WorkerId
from noetl_core.domain.playbook import Step
from noetl_core.domain.result_view import value_of
from noetl_core.domain.timers import is_timed_by_broker
from noetl_core.domain.tools import PARKED_KINDS
from noetl_core.store import inbox
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, Failed, Parked
from noetl_worker.chunks import Chunks, Send
from noetl_worker.credentials import Credentials
from noetl_worker.cursor import run_frame
from noetl_worker.names import Names
from noetl_worker.patience import patiently, read_patiently
from noetl_worker.persist import persist, persist_chunk, persist_parked, store_problem
from noetl_worker.pipeline import Ended, Pipeline
from noetl_worker.plan import Plans, StepPlan, TaskPlan
from noetl_worker.safe_errors import as_text
from noetl_worker.tool_slots import ToolSlots
from noetl_worker.tools.registry import Registry
from noetl_worker.tools.tool import ToolCall, ToolFailedError, ToolParked, ToolResult
from noetl_worker.tracing import CommandSpans

log = structlog.get_logger()


class Sink(Protocol):
    """Writes what a pipeline returned to where the step's `sink` says; gives why it could not.

    `names` has the result as `output`. `leased.command_id` names the work for its idempotency key:
    in a cursor loop it is not the id of the command but says which rows the result is of.
    """

    async def __call__(
        self, plan: StepPlan, names: Names, ended: Ended, leased: Leased
    ) -> ToolError | None: ...


class Performer:
    """What commands are performed with."""

    def __init__(
        self,
        pool: Pool,
        *,
        worker_id: WorkerId,
        plans: Plans,
        results: ResultStore,
        tools: Registry,
        credentials: Credentials,
        sink: Sink | None = None,
        send_chunk: Send | None = None,
        tool_slots: ToolSlots | None = None,
        spans: CommandSpans | None = None,
    ) -> None:
        self._spans = spans
        self._tool_slots = tool_slots or ToolSlots({})
        self._sink = sink
        self._send_chunk = send_chunk or partial(inbox.put_durably, pool)
        self._pool = pool
        self._worker_id = worker_id
        self._plans = plans
        self._results = results
        self._tools = tools
        self._credentials = credentials

    async def perform(self, leased: Leased) -> Done | Failed | Parked:
        if self._spans is None:
            return await self._outcome(leased)
        begun_ns = time.time_ns()
        message = await self._outcome(leased)
        self._spans.tell(leased, message, begun_ns=begun_ns)
        return message

    def stopped(self, leased: Leased, *, begun_ns: int) -> None:
        """It is not performed to its end, and will say nothing."""
        if self._spans is not None:
            self._spans.stopped(leased, self._worker_id, begun_ns=begun_ns)

    async def _outcome(self, leased: Leased) -> Done | Failed | Parked:
        started = time.perf_counter()
        try:
            return await self._perform(leased, started)
        except ToolFailedError as error:
            return self._failed(leased, error.error, started)
        except ReferenceNotAvailableError as error:
            return self._failed(leased, error.as_tool_error(), started)
        except RejectedError as error:
            kind = "not_found" if isinstance(error, NotFoundError) else "playbook_invalid"
            return self._failed(leased, ToolError(kind=kind, message=str(error)), started)
        except Exception as error:  # noqa: BLE001 - it is told, here and to the broker
            return self.broken(leased, error, started)

    def broken(self, leased: Leased, error: Exception, started: float | None = None) -> Failed:
        """A bug of ours or of a plugin. One command must not stop the others."""
        log.error(
            "command.broken",
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            exc_info=error,
        )
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        message = as_text(f"{type(cause).__name__}: {cause}"[:500])
        return self._failed(
            leased,
            ToolError(kind="internal", message=message),
            time.perf_counter() if started is None else started,
        )

    async def _perform(self, leased: Leased, started: float) -> Done | Failed | Parked:
        brief = decode_brief(leased.payload)
        plan = await patiently(lambda: self._plans.find(brief.catalog_id, brief.step))
        problem = store_problem(plan.step.output, self._results)
        if problem is not None:
            return self._failed(leased, problem, started)
        names = await self._names(leased, brief, plan)
        chunks = self._chunks(leased, brief, plan) if plan.is_streamed else None
        ended = await self._ended(leased, plan, names, chunks)
        if ended.parked is not None:
            return await persist_parked(
                self._results, leased, self._worker_id, plan, ended.parked, names
            )
        duration_ms = round((time.perf_counter() - started) * 1000, 3)
        return await persist(
            self._results,
            leased,
            self._worker_id,
            plan,
            ended,
            names,
            duration_ms,
            chunks=chunks.sent if chunks is not None else 0,
        )

    async def _ended(
        self, leased: Leased, plan: StepPlan, names: Names, chunks: Chunks | None
    ) -> Ended:
        run = partial(self._run, plan, chunks)
        if plan.cursor is None:
            return await _within(_timeout_s(plan.step), run(names, leased))
        claim = self._runner(leased, names, None)
        return await run_frame(plan, names, leased, claim=claim, run=run)

    async def _run(
        self, plan: StepPlan, chunks: Chunks | None, names: Names, leased: Leased
    ) -> Ended:
        """The pipeline once, and the sink after it."""
        ended = await Pipeline(plan, names, self._runner(leased, names, chunks)).run()
        if plan.sink is None or ended.error is not None:
            return ended
        error = await self._written(plan, names, ended, leased)
        return ended if error is None else ended._replace(error=error)

    async def _written(
        self, plan: StepPlan, names: Names, ended: Ended, leased: Leased
    ) -> ToolError | None:
        if self._sink is None:
            return ToolError(kind="not_supported", message="this worker writes to no `sink`")
        names.look_at(ended.document, None)
        try:
            with _cancelled_only_by_us():
                error = await self._sink(plan, names, ended, leased)
        except ReferenceNotAvailableError as gone:
            error = gone.as_tool_error()
        if error is None:
            return None
        return msgspec.structs.replace(error, details={**error.details, "sink": True})

    def _runner(self, leased: Leased, names: Names, chunks: Chunks | None) -> "_ToolRunner":
        results = _Results(self, leased.execution_id)
        return _ToolRunner(leased, names, self._tools, results, chunks, self._tool_slots)

    def _chunks(self, leased: Leased, brief: Brief, plan: StepPlan) -> Chunks:
        store = partial(persist_chunk, self._results, leased, self._worker_id, plan)
        return Chunks(store, self._send_chunk, leased.shard_id, recorded=brief.chunks)

    async def _names(self, leased: Leased, brief: Brief, plan: StepPlan) -> Names:
        async def open_credential(name: str) -> Any:
            return await patiently(lambda: self._credentials.open(name))

        return Names(
            plan,
            brief,
            await self._element(leased, brief),
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            load=lambda reference: self.load(leased.execution_id, reference),
            open_credential=open_credential,
        )

    async def load(self, execution_id: ExecutionId, reference: Reference) -> Any:
        return await read_patiently(
            execution_id, lambda: self._results.get(self._pool, execution_id, reference)
        )

    async def file(self, execution_id: ExecutionId, reference: Reference) -> Path | None:
        if reference.execution_id is not None:
            return None  # whether it may be read is decided where it is loaded
        found: Path | None = await read_patiently(
            execution_id, lambda: self._results.file_of(self._pool, execution_id, reference)
        )
        return found

    async def _element(self, leased: Leased, brief: Brief) -> Any:
        """The item of the loop; a large one is not in the brief but in its part."""
        where = brief.element
        if where is None or where.is_inline:
            return None if where is None else where.value
        part = await read_patiently(
            leased.execution_id,
            lambda: self._results.part(self._pool, leased.execution_id, where.loop_id, where.part),
        )
        return part[where.offset]

    def _failed(self, leased: Leased, error: ToolError, started: float) -> Failed:
        return Failed(
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            worker_id=self._worker_id,
            error=error,
            duration_ms=round((time.perf_counter() - started) * 1000, 3),
        )


class _Results:
    """What the tools of one execution can read of its results."""

    def __init__(self, performer: Performer, execution_id: ExecutionId) -> None:
        self._performer = performer
        self._execution_id = execution_id

    async def load(self, reference: Reference) -> Any:
        return value_of(await self._performer.load(self._execution_id, reference))

    async def file(self, reference: Reference) -> Path | None:
        return await self._performer.file(self._execution_id, reference)


class _ToolRunner:
    """Runs the tool of a task within the task's time."""

    def __init__(
        self,
        leased: Leased,
        names: Names,
        tools: Registry,
        results: _Results,
        chunks: Chunks | None,
        tool_slots: ToolSlots,
    ) -> None:
        self._tool_slots = tool_slots
        self._leased = leased
        self._results = results
        self._names = names
        self._tools = tools
        self._chunks = chunks

    async def __call__(
        self, task: TaskPlan, config: Mapping[str, Any], given: Mapping[str, Any], attempt: int
    ) -> ToolResult | ToolParked:
        kind = task.task.kind
        tool = self._tools.find(kind)
        if tool is None:
            message = f"this worker has no tool of kind {kind!r}"
            raise ToolFailedError(ToolError(kind="not_found", code="NO_TOOL", message=message))
        call = self._call(task, config, given, attempt)
        try:
            async with self._tool_slots.gate(kind), asyncio.timeout(call.timeout_s):
                with _cancelled_only_by_us():
                    result = await tool.run(call)
        except TimeoutError:
            if call.timeout_s is None:
                raise
            return ToolResult(error=_late(task.task.label, call.timeout_s))
        if isinstance(result, ToolParked) and kind not in PARKED_KINDS:
            message = f"the tool {kind!r} wants to wait without a worker, which its kind may not"
            raise ToolFailedError(ToolError(kind="internal", message=message))
        return result

    def _call(
        self, task: TaskPlan, config: Mapping[str, Any], given: Mapping[str, Any], attempt: int
    ) -> ToolCall:
        leased, chunks = self._leased, self._chunks
        return ToolCall(
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            step=leased.step,
            label=task.task.label,
            config=config,
            input=given,
            names={**self._names.element, **given} if self._names.element else given,
            attempt=attempt,
            timeout_s=task.task.timeout_s,
            credential=self._names.credential,
            results=self._results,
            emit=None if chunks is None else chunks.emit,
            chunks_done=0 if chunks is None else chunks.begin(attempt),
        )


class CancelledByItselfError(Exception):
    """Foreign code waited for something that a library of its own has cancelled."""


@contextmanager
def _cancelled_only_by_us() -> Iterator[None]:
    """Whoever sees a cancellation takes it for ours, and says nothing of the command, or of the row
    of a frame. Where nobody has asked for it, it is a failure like any other."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CancelledByItselfError("it was cancelled, and not by the worker") from error


def _timeout_s(step: Step) -> float | None:
    """What we keep; the broker keeps the time of a step that is more than one run of ours."""
    return None if is_timed_by_broker(step) else step.spec.timeout_s


async def _within(timeout_s: float | None, run: Awaitable[Ended]) -> Ended:
    if timeout_s is None:
        return await run
    try:
        async with asyncio.timeout(timeout_s):
            return await run
    except TimeoutError:
        return Ended(error=_late("the step", timeout_s))


def _late(what: str, timeout_s: float) -> ToolError:
    return ToolError(
        kind="timeout", message=f"{what} took longer than {timeout_s:g} s", retryable=True
    )
