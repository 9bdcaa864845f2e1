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
What happens when Postgres refuses: a statement that fails for want of Postgres, or because a
migration changes the schema at this moment, is done again. One that does not fit the schema at all
ends the process: no execution is to blame for it, so none is ended.
"""

import time
from collections.abc import Callable, Iterable, Mapping

import asyncpg
import msgspec
import structlog

from noetl_broker.accept import (
    COMMAND_ATTEMPTS_MAX,
    ExecutionMessage,
    accept,
    checkpoint,
    claim_before,
    expire,
)
from noetl_broker.family import on_end, start_child
from noetl_broker.left import Left
from noetl_broker.metrics import COMMIT_MS, RELOADS, measure
from noetl_broker.record import Recorder
from noetl_broker.refuse import (
    refuse_late,
    without_outdated,
    without_refused,
    without_strangers,
)
from noetl_broker.states import Live, States
from noetl_broker.turn import Closing, Letter, Taken, Turn
from noetl_core.blob.result_store import ResultStore
from noetl_core.domain.errors import ShardLostError, ToolError
from noetl_core.domain.events import (
    AnyFact,
    CommandExpired,
    CommandParked,
    Event,
    ExecutionFailed,
)
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import CommandId, EpochId, EventId, ExecutionId, RefId, ShardId
from noetl_core.domain.workers import NOBODY, Workers
from noetl_core.process.resilience import is_transient
from noetl_core.store import batch as batches
from noetl_core.store import holder
from noetl_core.store.batch import DeadLetterRow, FiredRow, OutgoingRow
from noetl_core.store.postgres import Connection, Pool, is_schema_wrong
from noetl_core.wire.messages import (
    Barrier,
    Done,
    Due,
    Expired,
    Failed,
    Parked,
    Partial,
    Reconcile,
    Retry,
    Signal,
    Start,
    Stored,
    encode_messages,
)

MARKED_MAX = 1000
"""Executions that one barrier marks on a shard, besides those that moved in the same turn."""

log = structlog.get_logger()


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
        workers: Callable[[], Workers] = lambda: NOBODY,
        attempts_max: int = COMMAND_ATTEMPTS_MAX,
    ) -> None:
        self._pool = pool
        self._held = held
        self._mint = mint
        self._attempts_max = attempts_max
        self._recorder = Recorder(results, mint, workers)
        self._unmarked: dict[ShardId, set[ExecutionId]] = {}
        self._forgotten: set[ShardId] = set()
        self._left: dict[ShardId, Left] = {}
        self._recounted: int | None = None
        self.states = states

    async def advance(self, letters: list[Letter]) -> Turn:
        """Record what follows from these letters. Raises ShardLostError when a fence stops it."""
        async with self._pool.acquire() as conn:
            turn = self._turn(conn, self._held())
            taken = turn.open(letters)
            try:
                await self._commit(turn, taken)
            except asyncpg.PostgresError as error:
                if _is_no_letters_fault(error):
                    raise
                log.info("broker.reload", reason=str(error), executions=len(turn.touched))
                RELOADS.add(1)
                turn = await self._carefully(conn, letters)
        self._settle(turn)
        return turn

    def _turn(self, conn: Connection, held: Mapping[ShardId, int]) -> Turn:
        self._forget()
        return Turn(conn, held, shard_count=self.states.shard_count)

    async def _carefully(self, conn: Connection, letters: list[Letter]) -> Turn:
        """The same letters, with every state read from the database and each lease looked at.

        What the database still refuses then (a text it cannot store, say) is found by doing the
        executions one by one.
        """
        turn = self._turn(conn, self._held())
        taken = turn.open(letters)
        try:
            await self._commit(turn, taken, reload=True)
        except asyncpg.PostgresError as error:
            if _is_no_letters_fault(error):
                raise
            log.warning("broker.one_by_one", reason=str(error), executions=len(turn.touched))
            turn = await self._one_by_one(conn, letters)
        return turn

    async def _one_by_one(self, conn: Connection, letters: list[Letter]) -> Turn:
        whole = self._turn(conn, self._held())
        by_execution: dict[ExecutionId, list[Taken]] = {}
        for one in whole.open(letters):
            if one.execution_id is not None:
                by_execution.setdefault(one.execution_id, []).append(one)
        for execution_id, taken in by_execution.items():
            turn = self._turn(conn, whole.held)
            try:
                await self._commit(turn, taken, reload=True)
            except asyncpg.PostgresError as error:
                if _is_no_letters_fault(error):
                    raise
                turn = self._turn(conn, whole.held)
                turn.poisoned[execution_id] = f"{type(error).__name__}: {error}"
                await self._commit(turn, taken)
            whole.absorb(turn)
        await self._send(whole)
        return whole

    def forget_shards(self, shards: Iterable[ShardId], *, shard_count: int | None = None) -> None:
        """These changed hands, away from us or to us: what we know of them may be old.

        It is forgotten before the next turn begins. The turn under way still reads its states: one
        that vanished under it would look like an execution that was never started, and the letters
        for that would be dropped.
        """
        for shard in shards:
            self._forgotten.add(shard)
            self._left.pop(shard, None)
        self._recounted = shard_count or self._recounted

    def take_over(self, left: Mapping[ShardId, Left], *, shard_count: int) -> None:
        """These are ours now, as their last owner has left them: with the next turn."""
        self.forget_shards(left, shard_count=shard_count)
        self._left.update(left)

    def _forget(self) -> None:
        if self._recounted is not None:
            self.states.recount(self._recounted)
        if self._forgotten:
            self.states.drop_shards(self._forgotten)
        for shard in self._forgotten:
            self._recorder.epochs.pop(shard, None)
            self._unmarked.pop(shard, None)
        for shard, left in self._left.items():
            self._unmarked[shard] = set(left.unmarked)
            if left.epoch is not None:
                self._recorder.epochs[shard] = left.epoch
        self._recounted = None
        self._forgotten.clear()
        self._left.clear()

    async def _commit(self, turn: Turn, taken: list[Taken], *, reload: bool = False) -> None:
        """Fold, decide, commit. Whatever goes wrong, no state outlives it that might be wrong."""
        try:
            await self._gather(turn, taken, reload=reload)
            await self._send(turn)
        except BaseException:
            self.states.drop(turn.touched)
            raise

    async def _send(self, turn: Turn) -> None:
        if turn.batch.is_empty:
            return
        begun = time.perf_counter()
        try:
            turn.told = await batches.commit(turn.conn, turn.batch)
        except asyncpg.PostgresError as error:
            if batches.is_fenced(error):
                raise ShardLostError(shard_ids=tuple(turn.batch.fences)) from error
            raise
        COMMIT_MS.record((time.perf_counter() - begun) * 1000)
        measure(turn.batch)

    async def _gather(self, turn: Turn, taken: list[Taken], *, reload: bool) -> None:
        # A Start is new, as far as we know; if it is not, the commit says so.
        known_before = {
            t.execution_id
            for t in taken
            if t.execution_id is not None and (reload or not isinstance(t.message, Start))
        }
        turn.poisoned |= await self.states.load(turn.conn, known_before)
        taken = await without_outdated(turn, await without_strangers(turn, taken))
        if reload:
            taken = await without_refused(turn, taken)
        for one in taken:
            await self._take(turn, one)
        for execution_id, reason in turn.poisoned.items():
            await self._park(turn, execution_id, reason, taken)
        await refuse_late(turn)

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
                    if _is_no_letters_fault(error):
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
        if isinstance(message, Due):
            turn.fence(shard)
            turn.batch.timers_fired.append(FiredRow(message.execution_id, message.timer))
        if isinstance(message, Retry) and message.execution_id in turn.touched:
            # It looks at what is recorded, and the commit removes every command of an execution
            # that ends in it: both only hold when the turn is over.
            self._put_off(turn, shard, message)
            return
        claim = claim_before(live.state, message)
        if claim is not None:
            await self._recorder.record(turn, shard, live, claim)
        event_id = EventId(self._mint())
        fact = accept(live.state, message, event_id, attempts_max=self._attempts_max)
        if fact is None:
            if isinstance(message, Done | Failed):
                turn.unheeded.append(message)
            return
        stored = _stored_with(message)
        if stored is not None:
            live.fresh[RefId(event_id)] = stored
        if isinstance(message, Parked) and isinstance(fact, CommandParked) and fact.child:
            start_child(turn, live.state, message, fact)
        await self._recorder.record(turn, shard, live, fact, event_id=event_id, stored=stored)
        _set_aside(turn, shard, message.execution_id, fact)

    def _put_off(self, turn: Turn, shard: ShardId, message: Retry) -> None:
        """Back into the inbox: it is read again when this turn is over."""
        turn.fence(shard)
        body = encode_messages([message])
        turn.batch.outgoing.append(OutgoingRow(message.execution_id, body))

    async def _reissue_lost(self, turn: Turn, shard: ShardId, live: Live) -> None:
        """An open command without a row can never end: close the attempt, which issues the next."""
        own = live.state.execution_id
        fresh = {row.command_id for row in turn.batch.commands if row.execution_id == own}
        open_commands = [
            c for c, held in live.state.commands.items() if c not in fresh and held.parked is None
        ]
        keys = [(own, c) for c in open_commands]
        rows = await holder.holders(turn.conn, keys)
        for key in keys:
            if key not in rows:
                await self._expire(turn, shard, live, key[1])

    async def _expire(self, turn: Turn, shard: ShardId, live: Live, command_id: CommandId) -> None:
        reason = "the command was lost"
        fact = expire(live.state, command_id, reason, attempts_max=self._attempts_max)
        if fact is not None:
            await self._recorder.record(turn, shard, live, fact)
            _set_aside(turn, shard, live.state.execution_id, fact)

    async def _close_epoch(self, turn: Turn, shard: ShardId, epoch: EpochId) -> None:
        if shard not in turn.held or epoch <= self._recorder.epochs.get(shard, 0):
            return
        moved = {e for e, s in turn.touched.items() if s == shard}
        before = self._unmarked.get(shard, set()) - moved
        # Without a barrier for long these may be many: the rest is for the barriers that follow.
        marked = sorted(before)[:MARKED_MAX]
        turn.closing[shard] = Closing(epoch, before.difference(marked))
        unreadable = await self.states.load(turn.conn, [*moved, *marked])
        for execution_id in [*moved, *marked]:
            if execution_id not in unreadable and execution_id not in turn.poisoned:
                await self._mark(turn, shard, execution_id, epoch)

    async def _mark(
        self, turn: Turn, shard: ShardId, execution_id: ExecutionId, epoch: EpochId
    ) -> None:
        """One that cannot be marked (its playbook is not understood any more, say) has no epoch
        until it moves again: that stops neither the barrier nor the shard."""
        live = self.states.get(execution_id)
        is_moved = execution_id in turn.touched
        try:
            fact = checkpoint(live.state, epoch)
            if fact is not None:
                await self._recorder.record(turn, shard, live, fact)
        except Exception as error:
            if _is_no_letters_fault(error):
                raise
            log.exception("broker.unmarked", execution_id=execution_id)
            if is_moved:
                turn.poisoned[execution_id] = f"{type(error).__name__}: {error}"
            else:
                turn.batch.forget(execution_id)
                turn.touched.pop(execution_id, None)
                self.states.drop([execution_id])

    async def _park(
        self, turn: Turn, execution_id: ExecutionId, reason: str, taken: Iterable[Taken]
    ) -> None:
        """Keep the letters for a person to look at, and end the execution with the reason."""
        own = [t for t in taken if t.execution_id == execution_id]
        if not own:
            return  # what it had to say was outdated: nothing is lost with it
        shard = own[0].shard_id
        turn.batch.forget(execution_id)
        body = encode_messages([t.message for t in own])
        turn.batch.dead_letters.append(DeadLetterRow(shard, execution_id, "broker", body, reason))
        turn.fence(shard)
        self.states.drop([execution_id])
        turn.touched[execution_id] = shard
        unreadable = await self.states.load(turn.conn, [execution_id])
        # What cannot be read can neither go on nor be ended: it is left to whoever mends it.
        if not unreadable and not self.states.get(execution_id).state.is_terminal:
            self._fail(turn, shard, execution_id, own, reason)
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
            started = accept(state, msgspec.structs.replace(start, payload=None), EventId(0))
            assert started is not None, start
            facts.append(started)
        message = f"the engine could not go on with this execution: {reason}"
        error = ToolError(kind="internal", message=message)
        facts.append(ExecutionFailed(error=error, generation=state.generation))
        for fact in facts:
            event = Event(execution_id=execution_id, event_id=EventId(self._mint()), fact=fact)
            self._recorder.append(turn, shard, event)
            fold(state, event)
        on_end(turn, state, event)
        turn.batch.ended_executions.append(execution_id)
        turn.batch.untimed.add(execution_id)

    def _settle(self, turn: Turn) -> None:
        """The commit is done: remember what the next barrier has to mark, trim the caches."""
        for execution_id, shard in turn.touched.items():
            unmarked = self._unmarked.setdefault(shard, set())
            # Without a barrier for long, only who is still here is marked by the next one.
            if self.states.settle(execution_id):
                unmarked.add(execution_id)
            else:
                unmarked.discard(execution_id)
        for shard, closing in turn.closing.items():
            # The close itself may have begun the shard's first epoch, after the barrier was sent.
            last = self._recorder.epochs.get(shard, closing.epoch)
            self._recorder.epochs[shard] = max(closing.epoch, last)
            self._unmarked[shard] = set(closing.unmarked)
        self.states.trim()


def _is_no_letters_fault(error: Exception) -> bool:
    return is_transient(error) or is_schema_wrong(error)


def _set_aside(turn: Turn, shard: ShardId, execution_id: ExecutionId, fact: AnyFact) -> None:
    """A command that was lost too often: something about it kills workers. Somebody should look."""
    if isinstance(fact, CommandExpired) and fact.again is None and fact.error is not None:
        lost = Expired(
            execution_id=execution_id, command_id=fact.command_id, reason=fact.error.message
        )
        reason = f"command {fact.command_id} was lost too often: {fact.error.message}"
        row = DeadLetterRow(shard, execution_id, "command", encode_messages([lost]), reason)
        turn.batch.dead_letters.append(row)


def _stored_with(message: ExecutionMessage) -> Stored | None:
    """The payload that comes with a message and is stored with the event that follows from it."""
    match message:
        case Start(payload=stored) | Parked(payload=stored):
            return stored
        case Done(stored=stored) | Failed(stored=stored) | Partial(stored=stored):
            return stored
        case Signal(data=stored):
            return stored
        case _:
            return None
