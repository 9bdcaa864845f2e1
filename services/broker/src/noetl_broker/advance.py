"""One turn of the broker: bodies in, one commit out.

    letters ─> messages ─> accept ─> fold + decide ─> Batch ─> commit_batch ─> wake-ups ─> ack

What happens when we die
  before the commit   the letters are not acknowledged, their inbox rows stay: they come again;
  in the commit       Postgres has all of it or none; if all, see below;
  after the commit    the letters come again, the reloaded state knows them, nothing follows. The
                      commands are rows that any worker finds; a lost wake-up costs its poll.
What happens when we are wrong: a state that is not what the database holds (a commit whose answer
we never got, a lease that another worker took over) makes the commit fail as a whole. The states
are dropped, loaded anew, and the letters done again.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import asyncpg
import msgspec
import structlog

from noetl_broker.accept import ExecutionMessage, accept, checkpoint, expire
from noetl_broker.states import Live, Playbooks, States
from noetl_core.blob.result_store import ResultStore, document_of
from noetl_core.domain.brief import brief_for, encode_brief
from noetl_core.domain.decide import Recorded, follow
from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import ReferenceNeeded, ShardLostError, ToolError
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CommandExpired,
    CommandIssued,
    Event,
    ExecutionCancelled,
    ExecutionFailed,
    ExecutionStarted,
    LoopStarted,
)
from noetl_core.domain.ids import CommandId, EpochId, EventId, ExecutionId, LoopId, RefId, ShardId
from noetl_core.domain.loop import split
from noetl_core.domain.playbook import Playbook
from noetl_core.process.resilience import is_transient
from noetl_core.store import batch as batches
from noetl_core.store.batch import (
    Batch,
    CollectionRow,
    CommandRow,
    DeadLetterRow,
    EndedRow,
    PartRow,
    RefusalRow,
    ResultRow,
)
from noetl_core.store.event import event_row
from noetl_core.store.postgres import Connection, Pool
from noetl_core.wire.messages import (
    Barrier,
    Done,
    Failed,
    Message,
    Reconcile,
    Start,
    Stored,
    decode_messages,
    encode_messages,
)

log = structlog.get_logger()


class Letter(NamedTuple):
    """A body that came in, by NATS or by the inbox."""

    shard_id: ShardId
    body: bytes
    inbox_id: int | None = None


class Taken(NamedTuple):
    shard_id: ShardId
    message: Message


class Turn:
    """What one turn has gathered so far."""

    def __init__(self, conn: Connection, held: Mapping[ShardId, int]) -> None:
        self.conn = conn
        self.held = dict(held)
        self.batch = Batch()
        self.touched: dict[ExecutionId, ShardId] = {}
        self.closing: dict[ShardId, EpochId] = {}
        self.poisoned: dict[ExecutionId, str] = {}
        self.work: Counter[tuple[ShardId, str]] = Counter()


class Broker:
    """The resources of a turn, and what survives from one turn to the next: caches only."""

    def __init__(
        self,
        pool: Pool,
        results: ResultStore,
        states: States,
        *,
        held: Callable[[], Mapping[ShardId, int]],
        mint: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._results = results
        self._held = held
        self._mint = mint
        self._ids: Iterator[int] = iter(mint, None)
        self._playbooks = Playbooks()
        self._epochs: dict[ShardId, EpochId] = {}
        self._unmarked: dict[ShardId, set[ExecutionId]] = {}
        self.states = states

    async def advance(self, letters: list[Letter]) -> Turn:
        """Record what follows from these letters. Raises ShardLostError when a fence stops it."""
        async with self._pool.acquire() as conn:
            turn = Turn(conn, self._held())
            try:
                await self._gather(turn, letters)
                await self._commit(turn)
            except asyncpg.PostgresError as error:
                self.states.drop(turn.touched)
                if not batches.is_stale(error):
                    raise
                log.info("broker.reload", reason=str(error), executions=len(turn.touched))
                turn = await self._redo(conn, letters)
            except BaseException:
                self.states.drop(turn.touched)
                raise
        self._settle(turn)
        return turn

    def forget_shard(self, shard: ShardId) -> None:
        self.states.drop_shard(shard)
        self._epochs.pop(shard, None)
        self._unmarked.pop(shard, None)

    async def _redo(self, conn: Connection, letters: list[Letter]) -> Turn:
        """The same letters, with every state read from the database and each lease looked at."""
        turn = Turn(conn, self._held())
        try:
            await self._gather(turn, letters, reload=True)
            await self._commit(turn)
        except BaseException:
            self.states.drop(turn.touched)
            raise
        return turn

    async def _gather(self, turn: Turn, letters: list[Letter], *, reload: bool = False) -> None:
        taken = [
            t for letter in letters if letter.shard_id in turn.held for t in _open(turn, letter)
        ]
        by_execution = [t for t in taken if not isinstance(t.message, Barrier)]
        await self.states.load(
            turn.conn,
            {
                t.message.execution_id
                for t in by_execution
                if not isinstance(t.message, Barrier)
                and (reload or not isinstance(t.message, Start))
            },
        )
        if reload:
            taken = await self._without_refused(turn, taken)
        for one in taken:
            await self._take(turn, one)
        for execution_id, reason in turn.poisoned.items():
            await self._park(turn, execution_id, reason, taken)

    async def _take(self, turn: Turn, taken: Taken) -> None:
        match taken.message:
            case Barrier(shard_id=shard, epoch=epoch):
                await self._close_epoch(turn, shard, epoch)
            case message if message.execution_id in turn.poisoned:
                pass
            case message:
                try:
                    await self._record_message(turn, taken.shard_id, message)
                except Exception as error:
                    if is_transient(error):
                        raise
                    # One bad execution never stops a shard: it is taken out of the batch and ended.
                    log.exception("broker.poisoned", execution_id=message.execution_id)
                    turn.poisoned[message.execution_id] = f"{type(error).__name__}: {error}"

    async def _record_message(
        self, turn: Turn, shard: ShardId, message: ExecutionMessage | Reconcile
    ) -> None:
        live = self.states.get(message.execution_id)
        if isinstance(message, Reconcile):
            await self._reissue_lost(turn, shard, live)
            return
        event_id = EventId(self._mint())
        fact = accept(live.state, message, event_id)
        if fact is None:
            return
        stored = message.payload if isinstance(message, Start) else getattr(message, "stored", None)
        if stored is not None and stored.inline is not None:
            live.inline[RefId(event_id)] = stored
        await self._record(turn, shard, live, fact, event_id=event_id, stored=stored)

    async def _record(
        self,
        turn: Turn,
        shard: ShardId,
        live: Live,
        fact: AnyFact,
        *,
        event_id: EventId | None = None,
        stored: Stored | None = None,
    ) -> None:
        """Everything that follows from a new fact goes into the batch, in order."""
        turn.touched[live.state.execution_id] = shard
        turn.batch.fences[shard] = turn.held[shard]
        catalog_id = (
            fact.catalog_id if isinstance(fact, ExecutionStarted) else live.state.catalog_id
        )
        playbook = await self._playbooks.get(turn.conn, catalog_id)
        ids = self._ids if event_id is None else itertools.chain((event_id,), self._ids)
        for item in follow(playbook, live.state, fact, live.known, ids):
            if isinstance(item, ReferenceNeeded):
                await self._load(turn, live, item)
            else:
                self._append(turn, shard, item.event)
                await self._write(turn, shard, playbook, live, item)
                if stored is not None:
                    turn.batch.results.append(_result_row(item.event, stored))
                    stored = None

    def _append(self, turn: Turn, shard: ShardId, event: Event) -> None:
        epoch = self._epochs.get(shard)
        turn.batch.events.append(event_row(event, shard_id=shard, epoch_id=epoch))

    async def _write(
        self, turn: Turn, shard: ShardId, playbook: Playbook, live: Live, item: Recorded
    ) -> None:
        """The rows beside the log that go with an event."""
        execution_id = item.event.execution_id
        match item.event.fact:
            case CommandIssued() as fact:
                row = await self._command_row(turn, shard, playbook, live, fact)
                turn.batch.commands.append(row)
                turn.work[shard, fact.pool] += 1
            case CallDone() | CallFailed() as fact:
                turn.batch.ended.append(EndedRow(execution_id, fact.command_id, fact.worker_id))
            case CommandExpired() as fact:
                turn.batch.ended.append(EndedRow(execution_id, fact.command_id, None))
            case LoopStarted() as fact:
                await self._store_collection(turn, live, item, fact)
            case ExecutionFailed() | ExecutionCancelled():
                turn.batch.ended_executions.append(execution_id)
            case _:
                pass

    async def _command_row(
        self, turn: Turn, shard: ShardId, playbook: Playbook, live: Live, fact: CommandIssued
    ) -> CommandRow:
        while True:
            try:
                brief = brief_for(playbook, live.state, fact, live.known)
                break
            except ReferenceNeeded as needed:
                await self._load(turn, live, needed)
        return CommandRow(
            live.state.execution_id,
            fact.command_id,
            shard,
            fact.step,
            fact.attempt,
            fact.pool,
            fact.priority,
            fact.delay_s,
            encode_brief(brief),
        )

    async def _store_collection(
        self, turn: Turn, live: Live, item: Recorded, fact: LoopStarted
    ) -> None:
        assert item.collection is not None, fact
        execution_id, loop_id = item.event.execution_id, LoopId(item.event.event_id)
        turn.batch.collections.append(
            CollectionRow(execution_id, loop_id, fact.step, fact.total, fact.parts)
        )
        for number, part in enumerate(split(item.collection, fact.part_size)):
            name = CommandId(f"{fact.step}.{fact.visit}/collection.{number}")
            stored = await self._results.put(execution_id, name, part)
            turn.batch.parts.append(
                PartRow(
                    execution_id,
                    loop_id,
                    number,
                    len(part),
                    stored.tier,
                    stored.uri,
                    stored.bytes,
                    stored.sha256,
                    stored.inline,
                )
            )
            live.known.parts[loop_id, number] = part

    async def _load(self, turn: Turn, live: Live, needed: ReferenceNeeded) -> None:
        execution_id, known = live.state.execution_id, live.known
        if needed.part is not None:
            assert needed.loop_id is not None, needed
            key = (needed.loop_id, needed.part)
            known.parts[key] = await self._results.part(turn.conn, execution_id, *key)
        elif needed.loop_id is not None:
            known.loops[needed.loop_id] = await self._results.results_of_loop(
                turn.conn, execution_id, needed.loop_id
            )
        else:
            assert needed.ref_id is not None, needed
            known.results[needed.ref_id] = await self._document(turn, live, needed.ref_id)

    async def _document(self, turn: Turn, live: Live, ref_id: RefId) -> object:
        """A result that came with a message of this turn is not in the database yet."""
        stored = live.inline.get(ref_id)
        if stored is not None:
            return document_of(stored)
        reference = Reference(ref_id=ref_id, type="db")
        return await self._results.get(turn.conn, live.state.execution_id, reference)

    async def _reissue_lost(self, turn: Turn, shard: ShardId, live: Live) -> None:
        """An open command without a row can never end: close the attempt, which issues the next."""
        fresh = {row.command_id for row in turn.batch.commands}
        open_commands = [c for c in live.state.commands if c not in fresh]
        keys = [(live.state.execution_id, c) for c in open_commands]
        rows = await batches.holders(turn.conn, keys)
        for key in keys:
            fact = None if key in rows else expire(live.state, key[1], "the command was lost")
            if fact is not None:
                await self._record(turn, shard, live, fact)

    async def _close_epoch(self, turn: Turn, shard: ShardId, epoch: EpochId) -> None:
        if shard not in turn.held or epoch <= self._epochs.get(shard, 0):
            return
        turn.closing[shard] = epoch
        marked = self._unmarked.get(shard, set()) | {
            e for e, s in turn.touched.items() if s == shard
        }
        await self.states.load(turn.conn, marked)
        for execution_id in marked:
            live = self.states.get(execution_id)
            fact = checkpoint(live.state, epoch)
            if fact is not None:
                await self._record(turn, shard, live, fact)

    async def _without_refused(self, turn: Turn, taken: list[Taken]) -> list[Taken]:
        """A completion counts only from the worker that holds the lease."""
        ends = [t for t in taken if isinstance(t.message, Done | Failed)]
        keys = [(t.message.execution_id, t.message.command_id) for t in ends]  # type: ignore[union-attr]
        found = await batches.holders(turn.conn, keys)
        refused = set()
        for t in ends:
            message = t.message
            assert isinstance(message, Done | Failed), message
            holder = found.get((message.execution_id, message.command_id))
            if holder is not None and holder != message.worker_id:
                refused.add(id(message))
                turn.batch.refusals.append(
                    RefusalRow(message.worker_id, message.execution_id, message.command_id)
                )
        return [t for t in taken if id(t.message) not in refused]

    async def _park(
        self, turn: Turn, execution_id: ExecutionId, reason: str, taken: Iterable[Taken]
    ) -> None:
        """Keep the letters for a person to look at, and end the execution with the reason."""
        own = [
            t
            for t in taken
            if not isinstance(t.message, Barrier) and t.message.execution_id == execution_id
        ]
        shard = own[0].shard_id
        turn.batch.forget(execution_id)
        body = encode_messages([t.message for t in own])
        turn.batch.dead_letters.append(DeadLetterRow(shard, execution_id, "broker", body, reason))
        turn.batch.fences[shard] = turn.held[shard]
        self.states.drop([execution_id])
        turn.touched[execution_id] = shard
        await self.states.load(turn.conn, [execution_id])
        state = self.states.get(execution_id).state
        if not state.is_terminal:
            self._fail(turn, shard, state.execution_id, own, reason)
        self.states.drop([execution_id])

    def _fail(
        self, turn: Turn, shard: ShardId, execution_id: ExecutionId, own: list[Taken], reason: str
    ) -> None:
        state = self.states.get(execution_id).state
        facts: list[AnyFact] = []
        if state.status == "PENDING":
            start = next((t.message for t in own if isinstance(t.message, Start)), None)
            if start is None:
                return
            facts.append(
                ExecutionStarted(
                    catalog_id=start.catalog_id, path=start.path, version=start.version
                )
            )
        message = f"the engine could not go on with this execution: {reason}"
        facts.append(ExecutionFailed(error=ToolError(kind="internal", message=message)))
        for fact in facts:
            event = Event(execution_id=execution_id, event_id=EventId(self._mint()), fact=fact)
            self._append(turn, shard, event)
        turn.batch.ended_executions.append(execution_id)

    async def _commit(self, turn: Turn) -> None:
        if turn.batch.is_empty:
            return
        try:
            await batches.commit(turn.conn, turn.batch)
        except asyncpg.PostgresError as error:
            if batches.is_fenced(error):
                raise ShardLostError(shard_ids=tuple(turn.batch.fences)) from error
            raise

    def _settle(self, turn: Turn) -> None:
        """The commit is done: remember what the next barrier has to mark, trim the caches."""
        for execution_id, shard in turn.touched.items():
            self._unmarked.setdefault(shard, set()).add(execution_id)
            self.states.get(execution_id).trim()
        for shard, epoch in turn.closing.items():
            self._epochs[shard] = epoch
            self._unmarked.pop(shard, None)
        self.states.trim()


def _open(turn: Turn, letter: Letter) -> Iterator[Taken]:
    """The messages of a letter; one that cannot be read is parked."""
    if letter.inbox_id is not None:
        turn.batch.inbox_ids.append(letter.inbox_id)
        turn.batch.fences[letter.shard_id] = turn.held[letter.shard_id]
    try:
        for message in decode_messages(letter.body):
            yield Taken(letter.shard_id, message)
    except msgspec.DecodeError as error:
        turn.batch.fences[letter.shard_id] = turn.held[letter.shard_id]
        turn.batch.dead_letters.append(
            DeadLetterRow(letter.shard_id, None, "broker", letter.body, str(error))
        )


def _result_row(event: Event, stored: Stored) -> ResultRow:
    fact = event.fact
    parent = getattr(fact, "result", None)
    parent_ref = None if parent is None or parent.parent_ref is None else parent.parent_ref.ref_id
    return ResultRow(
        event.execution_id,
        event.event_id,
        parent_ref,
        getattr(fact, "step", ""),
        stored.tier,
        stored.uri,
        stored.media_type,
        stored.bytes,
        stored.sha256,
        stored.inline,
    )
