"""The system in miniature: the real broker among pretended machines.

    gateway ─> inbox ─┐                                         ┌─> projection ─> snapshots
                      ├─> BrokerProcess (the real Broker) ─> Database ─> command rows ─> Worker
    worker ──> wire ──┘                                         ├─> reaper ─> wire
                                                                └─> inbox (parents and children)

`noetl_broker.advance.Broker` runs as it is, with accept, fold, decide and brief_for; what is made
up here is everything it talks to. Faults are methods and arguments: who uses none of them has the
undisturbed system. Run it inside `in_memory()`.

The wire loses, repeats and reorders; the inbox gives what is in it once and in its order.
"""

from collections import Counter
from collections.abc import Coroutine, Iterable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, cast

import asyncpg
from msgspec.structs import replace

from noetl_broker.advance import Broker
from noetl_broker.states import States
from noetl_broker.turn import Letter
from noetl_core.domain.analysis import pushed_paths
from noetl_core.domain.brief import Brief, decode_brief
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ShardLostError, ToolError
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import EpochId, ExecutionId, WorkerId
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.state import ExecutionState
from noetl_core.domain.timers import wait_timer
from noetl_core.wire.messages import (
    Barrier,
    Cancel,
    Claimed,
    Done,
    Due,
    Expired,
    Failed,
    Fork,
    Message,
    Parked,
    Partial,
    Pause,
    Reconcile,
    Resume,
    Retry,
    Signal,
    Start,
    encode_messages,
)
from support.ledger import encode_state
from support.memory_database import (
    EVENTS_FROM,
    FORGER,
    SHARD,
    CommitFault,
    Database,
    Key,
    Results,
    TimerKey,
    stored,
)
from support.playbooks import (
    APPROVERS,
    CATALOG,
    CHILD_CATALOGS,
    NEXT_CALL,
    RETURN_STEPS,
    Plan,
    Tool,
    plan_of,
)

ROUNDS_MAX = 300
"""A round runs every command that is open, so this is the longest chain a case can have."""

EPOCHS_FROM = 1 << 40
"""The checkpointer mints its epochs above those that events have."""

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
            self.broker.forget_shards([SHARD])
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
        for execution_id in self.states._live:
            live = self.states.get(execution_id)
            expected = self._database.ledger(execution_id).state
            assert live.state == expected, (live.state, expected)


class Worker:
    def __init__(self, world: "World", number: int) -> None:
        self._world = world
        self._number = number
        self._lives = 0
        self.running: dict[Key, Brief] = {}
        self.finished: dict[Key, Done | Failed | Parked] = {}
        self._sent: Counter[Key] = Counter()
        """How many chunks of a result are on their way."""
        self.is_suspended = False

    @property
    def name(self) -> WorkerId:
        return WorkerId(f"w{self._number}.{self._lives}")

    def lease(self, limit: int, *, is_heard: bool = True) -> None:
        taken: list[Message] = []
        for key, row in self._world.database.rows.items():
            if row.worker_id is None and not row.is_held and len(taken) < limit:
                row.worker_id = self.name
                self.running[key] = brief = decode_brief(row.payload)
                self._sent[key] = brief.chunks
                taken.append(Claimed(execution_id=key[0], command_id=key[1], worker_id=self.name))
        if taken and is_heard:
            self._world.publish(*taken)

    def finish(self, limit: int, *, newest_first: bool = False) -> None:
        keys = list(self.running)[::-1] if newest_first else list(self.running)
        for key in keys[:limit]:
            brief = self.running[key]
            self.stream(COMMANDS_MAX, key)
            self.finished[key] = self._world.run(key, brief, self.name)
            del self.running[key]

    def stream(self, limit: int, *keys: Key) -> None:
        """Send the next chunks of what is running, and go on with it."""
        for key in keys or self.running:
            brief = self.running[key]
            chunks = self._world.tool_of(key, brief).chunks
            for number in range(self._sent[key], min(chunks, self._sent[key] + limit)):
                self._sent[key] = number + 1
                self._world.send_chunk(key, brief, self.name, number)

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
        self._sent.clear()
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


Road = Literal["wire", "inbox"]
"""How workers and the reaper reach the broker: as usual, or when there is no NATS."""


class Ending(NamedTuple):
    """How an execution ended: what two runs of one plan can be compared by."""

    status: str
    visits: tuple[tuple[str, int, str], ...]


class World:
    def __init__(
        self, plan: Plan, *, executions: int = 1, workers: int = 2, road: Road = "wire"
    ) -> None:
        self.plan = plan
        self.database = Database(plan.catalog)
        self.wire: list[bytes] = []
        self.broker = BrokerProcess(self.database)
        self.sleeping: list[BrokerProcess] = []
        """Brokers that lost the shard and do not know it."""
        self.workers = [Worker(self, number) for number in range(workers)]
        self.projection = Projection(self.database)
        self.execution_ids = [ExecutionId(number) for number in range(1, executions + 1)]
        """Those that somebody started; others are their children."""
        self.meddled: set[ExecutionId] = set()
        """Of those, the ones that do not end as if nobody had done anything."""
        self._road = road
        self._barriers = 0
        self._paused: set[ExecutionId] = set()
        """Executions that somebody wanted to stand still."""
        self._forged: set[Key] = set()
        self._signals: Counter[ExecutionId] = Counter()
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

    def fork(self, origin: ExecutionId, pick: int) -> None:
        """Somebody wants to go on from a step of another execution, with what was true there."""
        ledger = self.database.ledger(origin)
        steps = list(ledger.state.steps)
        if not steps or ledger.state.catalog_id != CATALOG:
            return
        execution_id = ExecutionId(len(self.execution_ids) + 1)
        self.execution_ids.append(execution_id)
        self.meddled.add(execution_id)
        fork = Fork(
            origin=origin,
            entry=steps[pick % len(steps)],
            ctx=ledger.state.ctx,
            steps={
                name: _of(origin, step.result)
                for name, step in ledger.state.steps.items()
                if step.result is not None
            },
        )
        start = Start(
            execution_id=execution_id, catalog_id=CATALOG, path="random", version=1, fork=fork
        )
        self.database.put_inbox(start)

    def tell(self, message: Cancel | Pause | Resume | Retry | Signal, *, twice: bool) -> None:
        """What a client was promised: it is in the inbox, and often on the wire as well."""
        self.database.put_inbox(message)
        if twice:
            self.publish(message)
        if isinstance(message, Pause):
            self._paused.add(message.execution_id)
        if not isinstance(message, Pause | Resume):
            self.meddled.add(self.root_of(message.execution_id))

    def signal(
        self, execution_id: ExecutionId, name: str, *, by: str = "", approved: bool = True
    ) -> Signal:
        self._signals[execution_id] += 1
        return Signal(
            execution_id=execution_id,
            signal_id=self._signals[execution_id],
            name=name,
            by=by,
            approved=approved,
            data=stored({"rows": [name], "ok": approved}),
        )

    def publish(self, *messages: Message) -> None:
        if self._road == "inbox":
            self.database.put_inbox(*messages)
        else:
            self.wire.append(encode_messages(list(messages)))

    def barrier(self) -> None:
        self._barriers += 1
        self.publish(Barrier(shard_id=SHARD, epoch=EpochId(EPOCHS_FROM + self._barriers)))

    def sweep(self) -> None:
        """The reaper: leases that ran out, executions in which nothing is under way."""
        for key, row in self.database.rows.items():
            if row.is_lapsed:
                self.publish(
                    Expired(execution_id=key[0], command_id=key[1], reason="the lease ran out")
                )
        moving = {key[0] for key in self.database.rows}
        waiting = {key[0] for key in self.database.timers if key[1].startswith("wait:")}
        idle = {key[0] for key in self.database.vanished} - moving - waiting
        for execution_id in sorted(idle):
            self.publish(Reconcile(execution_id=execution_id))

    def fire(self, timer: TimerKey, *, meddling: bool = False) -> None:
        """The reaper has seen that it is due. Only who meddles ends more than a plain wait."""
        execution_id, name = timer
        if self._wait_of(timer) is not None:
            self.publish(Due(execution_id=execution_id, timer=name))
        elif meddling:
            self.meddled.add(self.root_of(execution_id))
            self.publish(Due(execution_id=execution_id, timer=name))

    def awaited_signals(self) -> list[tuple[ExecutionId, str]]:
        return [
            (execution_id, command.parked.signal)
            for execution_id, ledger in self.database.ledgers.items()
            for command in ledger.state.commands.values()
            if command.parked is not None and command.parked.signal
        ]

    def _wait_of(self, timer: TimerKey) -> str | None:
        """The timer of a command that waits for nothing else, if this is one."""
        for command_id, command in self.database.ledgers[timer[0]].state.commands.items():
            parked = command.parked
            if wait_timer(command_id) == timer[1] and parked is not None:
                return timer[1] if parked.kind == "wait" and not parked.signal else None
        return None

    def root_of(self, execution_id: ExecutionId) -> ExecutionId:
        ledger = self.database.ledgers.get(execution_id)
        parent = None if ledger is None else ledger.state.parent_execution_id
        return execution_id if parent is None else self.root_of(parent)

    # What tools do

    def tool_of(self, key: Key, brief: Brief) -> Tool:
        return self.database.ledgers[key[0]].plan.tools[brief.step]

    def run(self, key: Key, brief: Brief, worker_id: WorkerId) -> Done | Failed | Parked:
        """The tool of a command, told by the plan what to answer."""
        self._check_brief(key, brief)
        tool = self.tool_of(key, brief)
        playbook = self.database.ledgers[key[0]].plan.playbook
        index = None if brief.element is None else brief.element.index
        place: dict[str, Any] = {
            "execution_id": key[0],
            "command_id": key[1],
            "worker_id": worker_id,
        }
        answer = tool.answer(
            brief.step, visit=brief.visit, index=index, attempt=brief.attempt, page=brief.page
        )
        if not answer.ok:
            error = ToolError(kind="boom", message="it was to fail")
            return Failed(error=error, ctx=answer.ctx, **place)
        match playbook.steps[brief.step].tool[0].kind:
            case "playbook":
                return Parked(kind="playbook", **self._child_of(key, tool), **place)
            case "wait":
                return Parked(kind="wait", **_WAITS[tool.wait], **place)
            case "approval":
                details = {"approvers": list(APPROVERS)}
                return Parked(kind="approval", signal=brief.step, details=details, **place)
        loop = playbook.steps[brief.step].loop
        is_cursor = loop is not None and loop.cursor is not None
        return Done(
            stored=stored(answer.value, is_large=tool.is_large),
            context=self._pushed(playbook, brief, answer.value) if tool.pushes else {},
            ctx=answer.ctx,
            frame_rows=answer.frame_rows if is_cursor else None,
            chunks=tool.chunks,
            **place,
        )

    def _child_of(self, key: Key, tool: Tool) -> dict[str, Any]:
        """A playbook that calls itself does so once."""
        is_root = self.database.ledgers[key[0]].state.depth == 0
        name = tool.child if is_root or tool.child != "itself" else "one"
        return {
            "catalog_id": CHILD_CATALOGS[name],
            "path": name,
            "version": 1,
            "payload": stored({"flag": True}) if tool.flag == "yes" else None,
            "return_step": RETURN_STEPS.get(name),
            "until_ms": 1 if tool.wait == "for a signal in time" else None,
        }

    def send_chunk(self, key: Key, brief: Brief, worker_id: WorkerId, number: int) -> None:
        value = {"ok": number % 2 == 0, "rows": [number]}
        self.database.put_inbox(
            Partial(
                execution_id=key[0],
                command_id=key[1],
                worker_id=worker_id,
                chunk_index=number,
                stored=stored(value),
                context={"data.ok": value["ok"]} if self.tool_of(key, brief).pushes else {},
            )
        )

    def _pushed(self, playbook: Playbook, brief: Brief, value: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for path in pushed_paths(playbook, brief.step):
            inner: Any = value
            for name in path.removeprefix("data.").split("."):
                inner = inner.get(name) if isinstance(inner, dict) else None
            if inner is not None:
                found[path] = inner
        return found

    def _check_brief(self, key: Key, brief: Brief) -> None:
        """A command is told what it needs: its item, the next call of its page, what came in."""
        self._check_element(key, brief)
        playbook = self.database.ledgers[key[0]].plan.playbook
        on_success = playbook.steps[brief.step].retry.on_success
        turns = on_success is not None and on_success.next_call == NEXT_CALL and brief.page > 1
        assert brief.call == ({"params": {"page": brief.page}} if turns else {}), brief

    def _check_element(self, key: Key, brief: Brief) -> None:
        """An item is the one that the collection has at its index."""
        element = brief.element
        if element is None or (key[0], element.loop_id) not in self.database.manifests:
            return
        items = self.database.collection(key[0], element.loop_id)
        assert element.value == items[element.index], element
        assert element.total == len(items), element
        assert element.index == element.offset, element

    # Faults

    def letters(self, picks: Iterable[int] | None = None) -> list[Letter]:
        """What the broker could take: everything in order, or what is picked, in that order."""
        wire = [Letter(SHARD, body) for body in self.wire]
        inbox = [Letter(SHARD, body, number) for number, body in self.database.inbox.items()]
        if picks is None:
            return wire + inbox
        picked = []
        count = len(wire) + len(inbox)
        for pick in picks if count else ():
            number = pick % count
            if number < len(wire):
                picked.append(wire[number])
            elif inbox:
                picked.append(inbox.pop(0))
        return picked

    def letters_backwards(self) -> list[Letter]:
        """The inbox is read in its order whatever happens, the wire is not."""
        wire = [Letter(SHARD, body) for body in reversed(self.wire)]
        return self.letters()[len(wire) :] + wire

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
            place: dict[str, Any] = {
                "execution_id": execution_id,
                "command_id": command_id,
                "worker_id": FORGER,
            }
            self.publish(Done(stored=stored("forged"), **place))
            self.publish(Parked(kind="wait", signal="never", **place))

    def lapse(self, pick: int, *, all_of_them: bool) -> None:
        """Leases run out, whether or not their worker is still there."""
        held = [row for row in self.database.rows.values() if row.worker_id is not None]
        for row in held if all_of_them or not held else [held[pick % len(held)]]:
            row.is_lapsed = True
        self.sweep()

    def give_back(self, pick: int) -> None:
        """A worker lets go of what it has; what it still says of it may come first."""
        name = self.workers[pick % len(self.workers)].name
        for row in self.database.rows.values():
            if row.worker_id == name:
                row.is_lapsed = row.is_given_back = True
        self.sweep()

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

    def finish(self, *, one_by_one: bool = False) -> None:
        """Faults off: heal everything and run until nothing is left to do."""
        for _ in range(ROUNDS_MAX):
            if self._is_over():
                return
            self.calm_round(one_by_one=one_by_one)
        raise AssertionError(
            f"it does not end: {[x.state for x in self.database.ledgers.values()]}"
        )

    def calm_round(self, *, one_by_one: bool = False) -> None:
        """Everybody does his work once; nothing goes wrong."""
        self.database.settle_late()
        if self.broker.in_hand:
            self.advance([])
        self._take_all(one_by_one=one_by_one)
        for worker in self.workers:
            worker.is_suspended = False
            worker.heartbeat()
            worker.lease(-(-len(self.database.rows) // len(self.workers)))
        for worker in self.workers:
            worker.finish(COMMANDS_MAX)
            worker.report(one_by_one=one_by_one)
        self._take_all(one_by_one=one_by_one)
        self._lapse_ghosts()
        self.sweep()
        self._end_waits()
        self.projection.project(EVENTS_MAX)

    def _take_all(self, *, one_by_one: bool) -> None:
        letters = self.letters()
        for batch in [[letter] for letter in letters] if one_by_one else [letters]:
            self.advance(batch)

    def _end_waits(self) -> None:
        """Time passes for what waits for time, somebody says what others wait for, and whoever has
        paused something lets it go on. What has a limit keeps to it."""
        for timer in sorted(self.database.timers):
            if self._wait_of(timer) is not None:
                self.fire(timer)
        for execution_id, ledger in list(self.database.ledgers.items()):
            if ledger.state.status == "PAUSED" and execution_id in self._paused:
                self.database.put_inbox(Resume(execution_id=execution_id))
            for command in ledger.state.commands.values():
                if command.parked is not None and command.parked.signal:
                    by = (*command.parked.approvers, "")[0]
                    self.database.put_inbox(self.signal(execution_id, command.parked.signal, by=by))

    def _lapse_ghosts(self) -> None:
        alive = {worker.name for worker in self.workers}
        for row in self.database.rows.values():
            is_ghost = row.worker_id is not None and row.worker_id not in alive
            row.is_lapsed = is_ghost or row.is_given_back

    def _is_over(self) -> bool:
        ledgers = self.database.ledgers
        return (
            not self.wire
            and not self.database.inbox
            and all(execution_id in ledgers for execution_id in self.execution_ids)
            and all(ledger.state.is_terminal for ledger in ledgers.values() if ledger.events)
            and self.database.watermark == self.database.newest_event_id
        )

    # What must hold

    def check(self) -> None:
        self.database.check()
        self.broker.check()
        if not self.database.inbox and not self.database.late:
            self._check_families()

    def _check_families(self) -> None:
        """Nobody waits for a child that has ended; nobody runs for a parent that does not wait."""
        waiting: dict[ExecutionId, Key] = {}
        for execution_id, ledger in self.database.ledgers.items():
            for command_id, command in ledger.state.commands.items():
                child = None if command.parked is None else command.parked.child
                if child is not None:
                    waiting[child] = (execution_id, command_id)
        for child, key in waiting.items():
            state = self.database.ledgers[child].state
            assert not state.is_terminal, (child, key)
            is_held_up = state.status == "PAUSED" and child not in self._paused
            status = self.database.ledgers[key[0]].state.status
            assert not is_held_up or status == "PAUSED", (child, key)
        for execution_id, ledger in self.database.ledgers.items():
            if execution_id > EVENTS_FROM and ledger.state.is_open and not ledger.state.generation:
                state = ledger.state
                parent = (state.parent_execution_id, state.parent_command_id)
                assert waiting.get(execution_id) == parent, (execution_id, parent)

    def check_end(self) -> None:
        self.check()
        self.projection.check()
        assert not self.database.rows, self.database.rows
        assert not self.database.timers, self.database.timers
        for ledger in self.database.ledgers.values():
            assert all(child in self.database.ledgers for child in ledger.children), ledger.children
            if ledger.events:
                ledger.check_end()
                # Any prefix will do; the checksum of the log picks one that a failure repeats.
                ledger.check_prefix(ledger.events[-1].event_id * 7919 % len(ledger.events))
        if self.plan.is_confluent:
            self._check_endings()

    def _check_endings(self) -> None:
        """Whatever went wrong on the way, it ends as if nothing had."""
        lost = {self.root_of(e) for e, x in self.database.ledgers.items() if x.lost_for_good}
        for execution_id in self.execution_ids:
            if execution_id not in self.meddled | lost:
                undisturbed = undisturbed_ending(self.plan.throws)
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

    def keys(self) -> Counter[tuple[int, str]]:
        """What is in the log, whatever the order and the ids: by playbook, how often each key."""
        ledgers = self.database.ledgers.values()
        return Counter((x.state.catalog_id, key) for x in ledgers for key in x.keys)


def _of(origin: ExecutionId, result: Envelope) -> Envelope:
    reference = result.reference
    if reference is None or reference.execution_id is not None:
        return result
    return replace(result, reference=replace(reference, execution_id=origin))


_WAITS: dict[str, dict[str, Any]] = {
    "for time": {"until_ms": 1},
    "for a signal": {"signal": "go"},
    "for a signal in time": {"signal": "go", "until_ms": 1},
}


@lru_cache(maxsize=64)
def undisturbed_ending(throws: bytes) -> Ending:
    world = World(plan_of(throws))
    world.finish()
    return world.ending(world.execution_ids[0])
