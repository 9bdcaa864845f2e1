"""Facts into rows: what follows from a new fact, and the rows beside the log that go with it."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from noetl_broker.beside import write_beside, write_result
from noetl_broker.placing import place
from noetl_broker.read import Reader
from noetl_broker.states import Live, Playbooks
from noetl_broker.turn import Turn
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.result_store import ResultStore
from noetl_core.blob.tier import ReferenceNotAvailableError
from noetl_core.domain.brief import brief_for, encode_brief
from noetl_core.domain.decide import Recorded, follow
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.events import AnyFact, CommandIssued, Event, ExecutionStarted, LoopStarted
from noetl_core.domain.ids import CommandId, EpochId, EventId, ExecutionId, LoopId, ShardId
from noetl_core.domain.loop import split
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.workers import NOBODY, Workers
from noetl_core.store.batch import CommandRow, ManifestRow, PartRow
from noetl_core.store.event import event_row
from noetl_core.wire.messages import Stored


class Recorder:
    def __init__(
        self,
        results: ResultStore,
        mint: Callable[[], int],
        workers: Callable[[], Workers] = lambda: NOBODY,
    ) -> None:
        self._results = results
        self._workers = workers
        self._reader = Reader(results)
        self._playbooks = Playbooks()
        self._ids: Iterator[int] = iter(mint, None)
        self.epochs: dict[ShardId, EpochId] = {}
        """The epoch that was closed last on each shard; events carry it. The first event of a shard
        that never had one begins one."""

    async def record(
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
        turn.fence(shard)
        catalog_id = (
            fact.catalog_id if isinstance(fact, ExecutionStarted) else live.state.catalog_id
        )
        playbook = await self._playbooks.get(turn.conn, catalog_id)
        ids = self._ids if event_id is None else itertools.chain((event_id,), self._ids)
        live.known.workers = self._workers()
        for item in follow(playbook, live.state, fact, live.known, ids):
            if isinstance(item, ReferenceNeeded):
                await self._reader.load(turn, live, item)
            else:
                self.append(turn, shard, item.event)
                await self._write(turn, shard, playbook, live, item)
                if stored is not None:
                    write_result(turn, item.event, stored)
                    stored = None

    def append(self, turn: Turn, shard: ShardId, event: Event) -> None:
        if shard not in self.epochs:
            self.epochs[shard] = EpochId(next(self._ids))
        row = event_row(event, shard_id=shard, epoch_id=self.epochs[shard])
        turn.batch.events.append(row)

    async def _write(
        self, turn: Turn, shard: ShardId, playbook: Playbook, live: Live, item: Recorded
    ) -> None:
        fact = item.event.fact
        if isinstance(fact, CommandIssued):
            row = await self._command_row(turn, shard, playbook, live, fact)
            turn.batch.commands.append(row)
            if live.state.status == "PAUSED":
                turn.batch.is_held[row.execution_id] = True
            place(turn, shard, playbook, live, fact)
        elif isinstance(fact, LoopStarted) and not fact.is_cursor:
            await self._store_collection(turn, live, item, fact)
        else:
            write_beside(turn, shard, playbook, live.state, item.event)

    async def _command_row(
        self, turn: Turn, shard: ShardId, playbook: Playbook, live: Live, fact: CommandIssued
    ) -> CommandRow:
        while True:
            try:
                brief = brief_for(playbook, live.state, fact, live.known)
                break
            except ReferenceNeeded as needed:
                await self._reader.load(turn, live, needed)
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
        meta = None if fact.base is None else msgspec.json.encode({"base": str(fact.base)}).decode()
        total = fact.base_done + fact.total
        turn.batch.manifests.append(
            ManifestRow(execution_id, loop_id, "collection", fact.step, total, fact.parts, meta)
        )
        for number, part in enumerate(split(item.collection, fact.part_size)):
            name = CommandId(f"{fact.step}.{fact.visit}/collection.{number}")
            stored = await self._put(execution_id, name, part)
            turn.batch.parts.append(
                PartRow(
                    execution_id,
                    loop_id,
                    number,
                    len(part),
                    stored.tier,
                    stored.uri,
                    stored.size,
                    stored.sha256,
                    stored.inline,
                )
            )
            live.known.parts[loop_id, number] = part

    async def _put(self, execution_id: ExecutionId, name: CommandId, part: list[Any]) -> Stored:
        """One execution that has no place for its items fails: all shards would wait for it."""
        try:
            return await self._results.put(execution_id, name, part)
        except StoreAwayError as error:
            reason = f"the items of a loop could not be stored: {error}"
            raise ReferenceNotAvailableError(reason, execution_id=execution_id) from error
