"""The system in miniature: the real broker among pretended machines.

    gateway ─> inbox ─┐                                         ┌─> projection ─> snapshots
                      ├─> BrokerProcess (the real Broker) ─> Database ─> command rows ─> Worker
    worker ──> wire ──┘                                         └─> reaper ─> wire

`noetl_broker.advance.Broker` runs as it is, with accept, fold, decide and brief_for; what is made
up here is everything it talks to. Faults are methods and arguments: who uses none of them has the
undisturbed system. Run it inside `in_memory()`.
"""

from collections.abc import Coroutine, Iterable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, cast

import asyncpg
import msgspec

from noetl_broker.advance import Broker
from noetl_broker.states import States
from noetl_broker.turn import Letter
from noetl_core.domain.analysis import pushed_paths
from noetl_core.domain.brief import Brief, decode_brief
from noetl_core.domain.errors import ShardLostError, ToolError
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import CatalogId, EpochId, ExecutionId, ShardId, WorkerId
from noetl_core.domain.state import ExecutionState
from noetl_core.wire.messages import (
    Barrier,
    Cancel,
    Claimed,
    Done,
    Expired,
    Failed,
    Message,
    Reconcile,
    Start,
    encode_messages,
)
from support.ledger import encode_state
from support.memory_database import FORGER, CommitFault, Database, Key, Results, stored
from support.playbooks import Plan, plan_of

SHARD = ShardId(0)
CATALOG = CatalogId(7)
ROUNDS_MAX = 300
"""A round runs every command that is open, so this is the longest chain a case can have."""

COMMANDS_MAX = 100
EVENTS_MAX = 10_000

T = TypeVar("T")


def _run(turn: Coroutine[Any, Any, T]) -> T:
    """Nothing here ever waits, so a coroutine runs to its end in one go."""
    try:
        turn.send(None)
    except StopIteration as finished:
        return cast("T", finished.value)
    raise AssertionError("a turn waited for something")


class BrokerProcess:
    """One life of a broker: what it has in memory is gone when the object is."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.epoch = database.claim()
        self.last_id = database.newest_event_id
        self.in_hand: list[Letter] = []
        """Taken and not known to be committed: tried again before anything else is taken."""
        self.is_fenced = False
        self.states = States(states_max=100, shard_count=1)
        self.broker = Broker(
            cast("Any", database),
            cast("Any", Results()),
            self.states,
            held=lambda: {SHARD: self.epoch},
            mint=self._mint,
        )

    def _mint(self) -> int:
        self.last_id += 1
        return self.last_id

    def advance(self, letters: list[Letter], fault: CommitFault = "none") -> bool:
        """One turn of the pump. True when it is committed, as far as this process knows."""
        self.in_hand = self.in_hand or letters
        self._database.fault = fault
        try:
            _run(self.broker.advance(self.in_hand))
        except asyncpg.exceptions.ConnectionDoesNotExistError:
            return False
        except ShardLostError:
            self.is_fenced = True
            self.broker.forget_shard(SHARD)
            return False
        finally:
            self._database.fault = "none"
        self.in_hand = []
        return True

    def forget(self) -> None:
        self.states.drop(list(self.states._live))

    def check(self) -> None:
        """What it remembers is what the log says, unless it does not know the log."""
        if self.is_fenced or self.in_hand:
            return
        for execution_id, live in self.states._live.items():
            expected = self._database.ledger(execution_id).state
            assert live.state == expected, (live.state, expected)


class Worker:
    def __init__(self, world: "World", number: int) -> None:
        self._world = world
        self._number = number
        self._lives = 0
        self.running: dict[Key, Brief] = {}
        self.finished: dict[Key, Done | Failed] = {}
        self.is_suspended = False

    @property
    def name(self) -> WorkerId:
        return WorkerId(f"w{self._number}.{self._lives}")

    def lease(self, limit: int) -> None:
        taken: list[Message] = []
        for key, row in self._world.database.rows.items():
            if row.worker_id is None and len(taken) < limit:
                row.worker_id = self.name
                self.running[key] = decode_brief(row.payload)
                taken.append(Claimed(execution_id=key[0], command_id=key[1], worker_id=self.name))
        if taken:
            self._world.publish(*taken)

    def finish(self, limit: int, *, newest_first: bool = False) -> None:
        keys = list(self.running)[::-1] if newest_first else list(self.running)
        for key in keys[:limit]:
            self.finished[key] = self._world.run(key, self.running.pop(key), self.name)

    def report(self, limit: int = COMMANDS_MAX, *, one_by_one: bool = False) -> None:
        """Publish what is finished; it is kept until the row is gone."""
        messages = list(self.finished.values())[:limit]
        for group in [[m] for m in messages] if one_by_one else [messages]:
            if group:
                self._world.publish(*group)

    def heartbeat(self) -> None:
        """Forget what has no row of ours any more: it is confirmed, or was cancelled."""
        for commands in (self.running, self.finished):
            for key in [k for k in commands if not self._holds(k)]:
                del commands[key]

    def crash(self) -> None:
        self.running.clear()
        self.finished.clear()
        self.is_suspended = False
        self._lives += 1

    def _holds(self, key: Key) -> bool:
        row = self._world.database.rows.get(key)
        return row is not None and row.worker_id == self.name


class Projection:
    """Folds the log into snapshots; its memory may be dropped at any moment."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._memory: dict[ExecutionId, ExecutionState] = {}

    def project(self, limit: int, *, crash: Literal["no", "before", "after"] = "no") -> None:
        events = self._database.events_after(self._database.watermark)[:limit]
        changed = {}
        for event in events:
            changed[event.execution_id] = fold(self._state(event.execution_id), event)
        if crash != "before" and events:
            for execution_id, state in changed.items():
                self._database.snapshot(execution_id, state)
            self._database.watermark = events[-1].event_id
        if crash != "no":
            self._memory.clear()

    def _state(self, execution_id: ExecutionId) -> ExecutionState:
        if execution_id not in self._memory:
            self._memory[execution_id] = self._database.state_of(execution_id)
        return self._memory[execution_id]

    def check(self) -> None:
        """Called when everything is projected: the snapshots are fold(all), byte for byte."""
        assert self._database.watermark == self._database.newest_event_id
        for execution_id, ledger in self._database.ledgers.items():
            state = self._database.state_of(execution_id)
            assert encode_state(state) == encode_state(ledger.state), (state, ledger.state)


class Ending(NamedTuple):
    """How an execution ended: what two runs of one plan can be compared by."""

    status: str
    visits: tuple[tuple[str, int, str], ...]


class World:
    def __init__(self, plan: Plan, *, executions: int = 1, workers: int = 2) -> None:
        self.plan = plan
        self.database = Database(plan.playbook)
        self.wire: list[bytes] = []
        self.broker = BrokerProcess(self.database)
        self.sleeping: list[BrokerProcess] = []
        """Brokers that lost the shard and do not know it."""
        self.workers = [Worker(self, number) for number in range(workers)]
        self.projection = Projection(self.database)
        self.execution_ids = [ExecutionId(number) for number in range(1, executions + 1)]
        self.cancelled: set[ExecutionId] = set()
        self._barriers = 0
        self._forged: set[Key] = set()
        for execution_id in self.execution_ids:
            self.start(execution_id)

    # What the others do

    def start(self, execution_id: ExecutionId) -> None:
        payload = None if self.plan.payload is None else stored(self.plan.payload)
        self.database.put_inbox(
            Start(
                execution_id=execution_id,
                catalog_id=CATALOG,
                path="random",
                version=1,
                payload=payload,
            )
        )

    def cancel(self, execution_id: ExecutionId) -> None:
        self.cancelled.add(execution_id)
        self.database.put_inbox(Cancel(execution_id=execution_id, reason="asked for"))

    def publish(self, *messages: Message) -> None:
        self.wire.append(encode_messages(list(messages)))

    def barrier(self) -> None:
        self._barriers += 1
        self.publish(Barrier(shard_id=SHARD, epoch=EpochId(self._barriers)))

    def sweep(self) -> None:
        """The reaper: leases that ran out, executions in which nothing is under way."""
        for key, row in self.database.rows.items():
            if row.is_lapsed:
                self.publish(
                    Expired(execution_id=key[0], command_id=key[1], reason="the lease ran out")
                )
        moving = {key[0] for key in self.database.rows}
        for execution_id in sorted({key[0] for key in self.database.vanished} - moving):
            self.publish(Reconcile(execution_id=execution_id))

    def run(self, key: Key, brief: Brief, worker_id: WorkerId) -> Done | Failed:
        """The tool of a command, told by the plan what to answer."""
        element = brief.element
        self._check_brief(key, brief)
        tool = self.plan.tools[brief.step]
        answer = tool.answer(
            brief.step,
            visit=brief.visit,
            index=None if element is None else element.index,
            attempt=brief.attempt,
        )
        if not answer.ok:
            return Failed(
                execution_id=key[0],
                command_id=key[1],
                worker_id=worker_id,
                error=ToolError(kind="boom", message="it was to fail"),
                ctx=answer.ctx,
            )
        return Done(
            execution_id=key[0],
            command_id=key[1],
            worker_id=worker_id,
            stored=stored(answer.value, is_large=tool.is_large),
            context=self._pushed(brief, answer.value) if tool.pushes else {},
            ctx=answer.ctx,
        )

    def _pushed(self, brief: Brief, value: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for path in pushed_paths(self.plan.playbook, brief.step):
            inner: Any = value
            for name in path.removeprefix("data.").split("."):
                inner = inner.get(name) if isinstance(inner, dict) else None
            if inner is not None:
                found[path] = inner
        return found

    def _check_brief(self, key: Key, brief: Brief) -> None:
        """An item is the one that the collection has at its index."""
        if brief.element is None:
            return
        element = brief.element
        part = msgspec.json.decode(self.database.parts[key[0], element.loop_id, element.part])
        assert element.value == part[element.offset], element
        assert element.total == self.database.totals[key[0], element.loop_id], element
        assert element.index == element.offset, element

    # Faults

    def letters(self, picks: Iterable[int] | None = None) -> list[Letter]:
        """What the broker could take: everything in order, or what is picked, in that order."""
        waiting = [Letter(SHARD, body) for body in self.wire]
        waiting += [Letter(SHARD, body, number) for number, body in self.database.inbox.items()]
        if picks is None or not waiting:
            return waiting
        return [waiting[pick % len(waiting)] for pick in picks]

    def advance(
        self, letters: list[Letter], fault: CommitFault = "none", *, acknowledged: bool = True
    ) -> bool:
        """A turn of the broker; what it has committed is acknowledged."""
        taken = self.broker.in_hand or letters
        is_committed = self.broker.advance(letters, fault)
        assert not self.broker.is_fenced, "the owner of the shard was fenced"
        if is_committed and acknowledged:
            self._acknowledge(taken)
        return is_committed

    def _acknowledge(self, letters: Iterable[Letter]) -> None:
        for letter in letters:
            if letter.inbox_id is None and letter.body in self.wire:
                self.wire.remove(letter.body)

    def crash_broker(self, *, after_commit_of: list[Letter] | None = None) -> None:
        """The process dies, at the worst moment if one is given; a new one claims the shard."""
        if after_commit_of is not None:
            self.broker.advance(after_commit_of)
        self.broker = BrokerProcess(self.database)

    def take_over(self) -> None:
        """The broker is given up for dead, but only sleeps."""
        self.sleeping.append(self.broker)
        self.broker = BrokerProcess(self.database)

    def wake_sleeper(self, letters: list[Letter]) -> None:
        """It goes on where it was; it must not write, and hears that the shard is not its own."""
        sleeper = self.sleeping.pop()
        sleeper.last_id = self.database.newest_event_id  # ids are made from the time of day
        before = (len(self.database.log), len(self.database.inbox))
        if sleeper.advance(letters):
            self._acknowledge(letters)
        assert (len(self.database.log), len(self.database.inbox)) == before, "a sleeper wrote"

    def forge(self, pick: int) -> None:
        """Somebody reports a command that a worker holds, and is not that worker."""
        held = [key for key, row in self.database.rows.items() if row.worker_id is not None]
        if held:
            execution_id, command_id = key = held[pick % len(held)]
            self._forged.add(key)
            self.publish(
                Done(
                    execution_id=execution_id,
                    command_id=command_id,
                    worker_id=FORGER,
                    stored=stored("forged"),
                )
            )

    def die_of_a_command(self, number: int) -> None:
        """A worker leases a command and dies; the lease runs out, and it is issued again."""
        worker = self.workers[number]
        worker.lease(1)
        name = worker.name
        worker.crash()
        for row in self.database.rows.values():
            row.is_lapsed |= row.worker_id == name
        self.sweep()
        self.advance(self.letters())

    def lose_row(self, pick: int) -> None:
        """Not of a command that is forged too: without its row nobody can tell who holds it."""
        keys = [key for key in self.database.rows if key not in self._forged]
        if keys:
            key = keys[pick % len(keys)]
            del self.database.rows[key]
            self.database.vanished.add(key)

    # To the end

    def finish(self) -> None:
        """Faults off: heal everything and run until nothing is left to do."""
        for _ in range(ROUNDS_MAX):
            if self._is_over():
                return
            self.calm_round()
        raise AssertionError(
            f"it does not end: {[x.state for x in self.database.ledgers.values()]}"
        )

    def calm_round(self) -> None:
        """Everybody does his work once; nothing goes wrong."""
        self.database.settle_late()
        if self.broker.in_hand:
            self.advance([])
        self.advance(self.letters())
        for worker in self.workers:
            worker.is_suspended = False
            worker.heartbeat()
            worker.lease(COMMANDS_MAX)
            worker.finish(COMMANDS_MAX)
            worker.report()
        self.advance(self.letters())
        self._lapse_ghosts()
        self.sweep()
        self.projection.project(EVENTS_MAX)

    def _lapse_ghosts(self) -> None:
        alive = {worker.name for worker in self.workers}
        for row in self.database.rows.values():
            row.is_lapsed = row.worker_id is not None and row.worker_id not in alive

    def _is_over(self) -> bool:
        ledgers = self.database.ledgers
        return (
            not self.wire
            and not self.database.inbox
            and all(e in ledgers and ledgers[e].state.is_terminal for e in self.execution_ids)
            and self.database.watermark == self.database.newest_event_id
        )

    # What must hold

    def check(self) -> None:
        self.database.check()
        self.broker.check()

    def check_end(self) -> None:
        self.check()
        self.projection.check()
        assert not self.database.rows, self.database.rows
        for ledger in self.database.ledgers.values():
            ledger.check_end()
            # Any prefix will do; the checksum of the log picks one that a failure repeats.
            ledger.check_prefix(ledger.events[-1].event_id * 7919 % len(ledger.events))
        if self.plan.is_confluent:
            self._check_endings()

    def _check_endings(self) -> None:
        """Whatever went wrong on the way, it ends as if nothing had."""
        undisturbed: Ending | None = None
        for execution_id, ledger in self.database.ledgers.items():
            if execution_id in self.cancelled or ledger.lost_for_good:
                continue
            undisturbed = undisturbed or undisturbed_ending(self.plan.throws)
            assert self.ending(execution_id) == undisturbed, (
                self.ending(execution_id),
                undisturbed,
            )

    def ending(self, execution_id: ExecutionId) -> Ending:
        state = self.database.ledgers[execution_id].state
        if state.status != "COMPLETED":
            return Ending(state.status, ())
        visits = [(name, step.visit, step.status) for name, step in state.steps.items()]
        return Ending(state.status, tuple(sorted(visits)))


@lru_cache(maxsize=64)
def undisturbed_ending(throws: bytes) -> Ending:
    world = World(plan_of(throws))
    world.finish()
    return world.ending(world.execution_ids[0])
