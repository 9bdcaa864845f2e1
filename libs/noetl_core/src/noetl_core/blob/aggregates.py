"""What a loop or a sequence of pages returned: no document of its own, but many put together.

Items and pages are read some hundreds with one statement. An item of a loop may itself be behind a
reference: to pages, to the result of a child, and that to a loop of the child.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from noetl_core.blob.documents import Documents, Wanted, document_in
from noetl_core.blob.history import History
from noetl_core.blob.tier import ReferenceNotAvailableError
from noetl_core.domain.envelope import Reference
from noetl_core.domain.ids import EventId, ExecutionId, LoopId
from noetl_core.domain.pages import PageRule, collected
from noetl_core.domain.result_view import value_of
from noetl_core.store import manifest
from noetl_core.store.loop_result import Ended
from noetl_core.store.manifest import PagePart, SequenceKey
from noetl_core.store.postgres import Connection, Pool

ITEMS_AT_ONCE = 10_000
"""How many items of a loop one statement reads."""
SEQUENCES_AT_ONCE = 200
"""How many sequences of pages one statement looks up."""

_NOTHING_FRESH: Final[Mapping[int, Any]] = MappingProxyType({})


class Sized(NamedTuple):
    value: Any
    size: int


class Aggregates:
    def __init__(self, documents: Documents, history: History) -> None:
        self._documents = documents
        self._history = history

    async def loop(
        self,
        conn: Connection | Pool,
        execution_id: ExecutionId,
        loop_id: LoopId,
        *,
        fresh: Mapping[int, Any] = _NOTHING_FRESH,
        base: LoopId | None = None,
    ) -> Sized:
        """The list of its results. `fresh`: values by index that go over what is stored."""
        loop = await manifest.activations(conn, execution_id, loop_id if base is None else base)
        loop_ids = loop.loop_ids if base is None else [loop_id, *loop.loop_ids]
        stop = loop.total
        if stop is None or stop > ITEMS_AT_ONCE:
            stop = await self._history.last_index(conn, execution_id, loop_ids) + 1
        values: dict[int, Any] = {}
        size = 0
        for start in range(0, stop, ITEMS_AT_ONCE):
            ended = await self._history.of_loop(
                conn, execution_id, loop_ids, start=start, stop=start + ITEMS_AT_ONCE
            )
            if loop.total is None:
                ended = [item for item in ended if item.is_frame or not item.is_done]
            size += await self._add_items(conn, execution_id, ended, values)
        values.update(fresh)
        if loop.total is None:
            return Sized([values[index] for index in sorted(values)], size)
        return Sized([values.get(index) for index in range(loop.total)], size)

    async def pages(
        self, conn: Connection | Pool, execution_id: ExecutionId, sequence: EventId
    ) -> Sized:
        key = (execution_id, sequence)
        return (await self._collect_each(conn, [key]))[key]

    async def pages_with(
        self,
        conn: Connection | Pool,
        execution_id: ExecutionId,
        sequence: EventId,
        *,
        fresh: Mapping[int, Any],
        rule: PageRule | None,
    ) -> Any:
        """`fresh`: documents by index that go over what is stored."""
        key, count = (execution_id, sequence), 0
        if rule is None:
            rule, count = (await self._rules(conn, [key]))[key]
        parts = (await manifest.page_parts(conn, [key])).get(key, [])
        stored = [part for part in parts if part.part_index not in fresh]
        documents = self._documents.stream(conn, _wanted(execution_id, stored))
        pages = {part.part_index: await anext(documents) for part in stored} | dict(fresh)
        count = max(count, *(index + 1 for index in pages)) if pages else count
        return collected(rule, (pages.get(index) for index in range(count)))

    async def each_page(
        self, conn: Connection | Pool, execution_id: ExecutionId, sequence: EventId
    ) -> AsyncIterator[Any]:
        """The documents in order; None for a page that returned nothing."""
        key = (execution_id, sequence)
        _, count = (await self._rules(conn, [key]))[key]
        parts = (await manifest.page_parts(conn, [key])).get(key, [])
        documents = self._documents.stream(conn, _wanted(execution_id, parts))
        returned = {part.part_index for part in parts}
        for index in range(count):
            yield await anext(documents) if index in returned else None

    async def rule(
        self, conn: Connection | Pool, execution_id: ExecutionId, sequence: EventId
    ) -> PageRule:
        key = (execution_id, sequence)
        return (await self._rules(conn, [key]))[key].rule

    async def resolve(
        self,
        conn: Connection | Pool,
        execution_id: ExecutionId,
        references: Mapping[int, Reference],
    ) -> dict[int, Sized]:
        """The values behind references of any kind, by the same numbers."""
        plain: dict[int, Wanted] = {}
        sequences: dict[int, SequenceKey] = {}
        found: dict[int, Sized] = {}
        for number, reference in references.items():
            owner = reference.execution_id or execution_id
            if reference.type == "eventlog":
                found[number] = await self.loop(conn, owner, LoopId(reference.ref_id))
            elif reference.type == "pages":
                sequences[number] = (owner, EventId(reference.ref_id))
            else:
                plain[number] = Wanted((owner, reference.ref_id), reference.bytes)
        documents = self._documents.stream(conn, list(plain.values()))
        for number, wanted in plain.items():
            found[number] = Sized(value_of(await anext(documents)), wanted.size)
        pages = await self._collect_each(conn, list(sequences.values()))
        return found | {number: pages[key] for number, key in sequences.items()}

    async def _add_items(
        self,
        conn: Connection | Pool,
        execution_id: ExecutionId,
        ended: Iterable[Ended],
        values: dict[int, Any],
    ) -> int:
        """Add what they returned by index; say how much it weighs."""
        elsewhere: dict[int, Reference] = {}
        size = 0
        for item in ended:
            index, row = item.iter_index, item.row
            values[index] = None
            if row is not None and row.inline is not None:
                values[index] = value_of(document_in(execution_id, row, row.inline))
                size += row.size
            elif (reference := item.elsewhere) is not None:
                elsewhere[index] = reference
        for index, found in (await self.resolve(conn, execution_id, elsewhere)).items():
            values[index] = found.value
            size += found.size
        return size

    async def _collect_each(
        self, conn: Connection | Pool, sequences: Sequence[SequenceKey]
    ) -> dict[SequenceKey, Sized]:
        found: dict[SequenceKey, Sized] = {}
        for start in range(0, len(sequences), SEQUENCES_AT_ONCE):
            batch = sequences[start : start + SEQUENCES_AT_ONCE]
            rules = await self._rules(conn, batch)
            parts = await manifest.page_parts(conn, batch)
            wanted = [w for key, own in parts.items() for w in _wanted(key[0], own)]
            documents = self._documents.stream(conn, wanted)
            pages = {
                key: {part.part_index: await anext(documents) for part in own}
                for key, own in parts.items()
            }
            for key, (rule, count) in rules.items():
                own = pages.get(key, {})
                value = collected(rule, (own.get(index) for index in range(count)))
                found[key] = Sized(value, sum(part.size for part in parts.get(key, ())))
        return found

    async def _rules(
        self, conn: Connection | Pool, sequences: Sequence[SequenceKey]
    ) -> dict[SequenceKey, manifest.Pages]:
        found = await manifest.pages(conn, sequences)
        for execution_id, sequence in sequences:
            if (execution_id, sequence) not in found:
                raise ReferenceNotAvailableError(
                    f"the manifest of the pages {sequence} is not stored", execution_id=execution_id
                )
        return found


def _wanted(execution_id: ExecutionId, parts: Iterable[PagePart]) -> list[Wanted]:
    return [Wanted((execution_id, part.ref_id), part.size) for part in parts]
