"""The log and the results of an execution, wherever they are by now.

They are in Postgres until their archive has taken their place, and then in its files: all rows of
an execution change over in one commit. So every question goes to Postgres first, and only where
it has no answer to the archives; the answer is the same.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from noetl_core.blob.place import Place
from noetl_core.domain.envelope import INLINE_BYTES_MAX, Reference
from noetl_core.domain.errors import NotFoundError
from noetl_core.domain.ids import EventId, ExecutionId, LoopId, RefId
from noetl_core.store import archive, event_read, loop_result, manifest, result_ref
from noetl_core.store.archive import File
from noetl_core.store.loop_result import INDEX_MAX, Ended, Weight
from noetl_core.store.postgres import Connection, Pool
from noetl_core.store.result_ref import ResultKey, StoredRow

if TYPE_CHECKING:
    import duckdb

Row = Any
"""A record of the database, or a dictionary with the same names."""

ARCHIVED_ITEMS_AT_ONCE = 50_000
"""How many items of an archived loop are found with one question; without what they returned."""
ARCHIVED_RESULTS_AT_ONCE = 10_000
ARCHIVED_BYTES_AT_ONCE = 32 * 1024 * 1024
"""What of these results is read with one question: each unpacks whole pieces of a file."""

_ANY_SIZE = 2**62

_decode_reference = msgspec.json.Decoder(Reference).decode


class ArchiveUnavailableError(NotFoundError):
    """The execution is in an archive that cannot be read from here."""


class Files(NamedTuple):
    """Those that may hold rows of one execution."""

    event: list[File]
    result_ref: list[File]


class History:
    def __init__(self, archives: Place | None = None) -> None:
        self._archives = archives
        # One question after the other: their memory is shared, and enough for any of them alone.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archives")
        self._duckdb: duckdb.DuckDBPyConnection | None = None

    async def is_archived(self, conn: Connection | Pool, execution_id: ExecutionId) -> bool:
        """Recorded in an archive: from then on its log must not go on."""
        return await archive.covers(conn, execution_id)

    async def page(
        self, conn: Connection | Pool, execution_id: ExecutionId, *, after: EventId, limit: int
    ) -> Sequence[Row]:
        """Events in log order, past `after`."""
        rows: Sequence[Row] = await event_read.page(conn, execution_id, after=after, limit=limit)
        if rows:
            return rows
        values = {"execution": execution_id, "after": after, "most": limit}
        return await self._events(conn, _PAGE, values)

    async def recorded_as(
        self, conn: Connection | Pool, execution_id: ExecutionId, ref_id: RefId
    ) -> Row | None:
        """The event with which a result of this execution was recorded."""
        row: Row | None = await event_read.recorded_as(conn, execution_id, ref_id)
        if row is None:
            found = await self._events(
                conn, _RECORDED_AS, {"execution": execution_id, "ref": ref_id}
            )
            row = found[0] if found else None
        if row is not None and not _has_again(row["context"]):
            return row
        return await self._referring_to(conn, execution_id, ref_id) or row

    async def _referring_to(
        self, conn: Connection | Pool, execution_id: ExecutionId, ref_id: RefId
    ) -> Row | None:
        row: Row | None = await event_read.referring_to(conn, execution_id, ref_id)
        if row is not None:
            return row
        found = await self._events(conn, _REFERRING_TO, {"execution": execution_id, "ref": ref_id})
        return found[0] if found else None

    async def find(
        self, conn: Connection | Pool, execution_id: ExecutionId, ref_ids: Sequence[RefId]
    ) -> dict[RefId, StoredRow]:
        """The results that are there, by id."""
        rows = await result_ref.find(conn, execution_id, ref_ids)
        missing = [ref_id for ref_id in ref_ids if ref_id not in rows]
        return rows | await self._archived_results(conn, execution_id, missing)

    async def find_each(
        self, conn: Connection | Pool, keys: Sequence[ResultKey]
    ) -> dict[ResultKey, StoredRow]:
        """The results that are there, of any executions."""
        rows = await result_ref.find_each(conn, keys)
        missing: dict[ExecutionId, list[RefId]] = defaultdict(list)
        for execution_id, ref_id in keys:
            if (execution_id, ref_id) not in rows:
                missing[execution_id].append(ref_id)
        for execution_id, ref_ids in missing.items():
            found = await self._archived_results(conn, execution_id, ref_ids)
            rows.update({(execution_id, ref_id): row for ref_id, row in found.items()})
        return rows

    async def of_loop(
        self,
        conn: Connection | Pool,
        execution_id: ExecutionId,
        loop_ids: Sequence[LoopId],
        *,
        start: int = 0,
        stop: int = INDEX_MAX,
    ) -> list[Ended]:
        """The items from `start` up to `stop` that have ended, in order."""
        items = await loop_result.of_loop(conn, execution_id, loop_ids, start=start, stop=stop)
        if items:
            return items
        files = await self._files(conn, execution_id)
        rows = await self._archived_items(files, execution_id, loop_ids, start=start, stop=stop)
        return await self._ended(files, execution_id, rows)

    async def pages_of_loop(
        self,
        conn: Connection | Pool,
        execution_id: ExecutionId,
        loop_ids: Sequence[LoopId],
        *,
        stop: int,
        size: int,
    ) -> AsyncIterator[list[Ended]]:
        """All items up to `stop` that have ended, in order, those of `size` indexes at a time."""
        for start in range(0, stop, size):
            end = min(start + size, stop)
            items = await loop_result.of_loop(conn, execution_id, loop_ids, start=start, stop=end)
            files = Files([], []) if items else await self._files(conn, execution_id)
            if files.event:
                rest = self._archived_pages(files, execution_id, loop_ids, start=start, stop=stop)
                async for page in rest:
                    yield page
                return
            yield items

    async def _archived_pages(
        self,
        files: Files,
        execution_id: ExecutionId,
        loop_ids: Sequence[LoopId],
        *,
        start: int,
        stop: int,
    ) -> AsyncIterator[list[Ended]]:
        """Every question reads all events of the execution, so few are asked: which items there are
        is known for many of them before the results of some are read."""
        for first in range(start, stop, ARCHIVED_ITEMS_AT_ONCE):
            end = min(first + ARCHIVED_ITEMS_AT_ONCE, stop)
            rows = await self._archived_items(files, execution_id, loop_ids, start=first, stop=end)
            for some in _in_portions(rows):
                yield await self._ended(files, execution_id, some)

    async def _archived_items(
        self,
        files: Files,
        execution_id: ExecutionId,
        loop_ids: Sequence[LoopId],
        *,
        start: int,
        stop: int,
    ) -> list[dict[str, Any]]:
        if not files.event:
            return []
        values: dict[str, Any] = {
            "execution": execution_id,
            "loops": _listed(loop_ids),
            "start": start,
            "stop": stop,
        }
        return await self._ask(_OF_LOOP, files.event, **values)

    async def _ended(
        self, files: Files, execution_id: ExecutionId, rows: Sequence[Row]
    ) -> list[Ended]:
        done = [RefId(row["event_id"]) for row in rows if row["is_done"]]
        results = await self._results(files, execution_id, done, inline_max=INLINE_BYTES_MAX)
        return [_ended(row, results) for row in rows]

    async def last_index(
        self, conn: Connection | Pool, execution_id: ExecutionId, loop_ids: Sequence[LoopId]
    ) -> int:
        """The greatest index that the log knows of; -1 for none."""
        index = await loop_result.last_index(conn, execution_id, loop_ids)
        if index >= 0:
            return index
        files = await self._files(conn, execution_id)
        if not files.event:
            return index
        values: dict[str, Any] = {"execution": execution_id, "loops": _listed(loop_ids)}
        rows = await self._ask(_LAST_INDEX, files.event, **values)
        return int(rows[0]["last"])

    async def weight(
        self, conn: Connection | Pool, execution_id: ExecutionId, loop_ids: Sequence[LoopId]
    ) -> Weight:
        """How much the results of a loop weigh together."""
        weight = await loop_result.weight(conn, execution_id, loop_ids)
        if weight.bytes or weight.loops:
            return weight
        files = await self._files(conn, execution_id)
        if not files.event:
            return weight
        values: dict[str, Any] = {
            "execution": execution_id,
            "loops": _listed(loop_ids),
            "start": 0,
            "stop": INDEX_MAX,
        }
        query = _WEIGHT if files.result_ref else _WEIGHT_WITHOUT_RESULTS
        (row,) = await self._ask(query, files.event, files.result_ref, **values)
        behind = [_decode_reference(text) for text in row["behind"] or ()]
        sequences = [
            (one.execution_id or execution_id, EventId(one.ref_id))
            for one in behind
            if one.type == "pages"
        ]
        size = int(row["bytes"]) + await manifest.pages_bytes_of(conn, sequences)
        return Weight(size, [one for one in behind if one.type == "eventlog"])

    async def _archived_results(
        self, conn: Connection | Pool, execution_id: ExecutionId, ref_ids: Sequence[RefId]
    ) -> dict[RefId, StoredRow]:
        if not ref_ids:
            return {}
        files = await self._files(conn, execution_id)
        return await self._results(files, execution_id, ref_ids)

    async def _results(
        self,
        files: Files,
        execution_id: ExecutionId,
        ref_ids: Sequence[RefId],
        *,
        inline_max: int = _ANY_SIZE,
    ) -> dict[RefId, StoredRow]:
        """Only those of up to `inline_max` come with their bytes."""
        if not ref_ids or not files.result_ref:
            return {}
        rows = await self._ask(
            _FIND,
            files.result_ref,
            execution=execution_id,
            refs=_listed(ref_ids),
            least=min(ref_ids),
            greatest=max(ref_ids),
            inline_max=inline_max,
        )
        return {RefId(row["ref_id"]): _stored(row) for row in rows}

    async def _events(
        self, conn: Connection | Pool, query: str, values: dict[str, Any]
    ) -> list[dict[str, Any]]:
        files = await self._files(conn, ExecutionId(values["execution"]))
        if not files.event:
            return []
        rows = await self._ask(query, files.event, **values)
        for row in rows:
            row["created_at"] = _moment(row["created_at"])
        return rows

    async def _files(self, conn: Connection | Pool, execution_id: ExecutionId) -> Files:
        files = Files([], [])
        for file in await archive.files_of(conn, execution_id):
            getattr(files, file.source).append(file)
        if self._archives is None and any(files):
            raise ArchiveUnavailableError(
                f"execution {execution_id} is past retention and in an archive: set "
                "NOETL_ARCHIVE_DIR (or NOETL_STORE_DIR) to where the archives are"
            )
        return files

    async def _ask(
        self, query: str, files: Sequence[File], more: Sequence[File] = (), **values: Any
    ) -> list[dict[str, Any]]:
        """`files` are $files in the query; `more`, where there are any, are $more."""
        assert self._archives is not None, files
        try:
            async with self._archives.at_hand([*files, *more]) as paths:
                if more:
                    values["more"] = [str(path) for path in paths[len(files) :]]
                asking = partial(self._ask_now, query, paths[: len(files)], values)
                return await asyncio.get_running_loop().run_in_executor(self._reader, asking)
        except FileNotFoundError as error:
            raise ArchiveUnavailableError(
                f"the archive {error} cannot be read: it is not there; set NOETL_ARCHIVE_DIR to "
                "the place that holds it, or bring it back from a backup"
            ) from error

    def _ask_now(
        self, query: str, files: list[Path], values: dict[str, Any]
    ) -> list[dict[str, Any]]:
        # Only whoever reads an archive pays for the library that can.
        from noetl_core.blob import parquet  # noqa: PLC0415

        if self._duckdb is None:
            self._duckdb = parquet.connect()
        return parquet.ask(self._duckdb, query, files, **values)


_PAGE = f"""
SELECT {event_read.COLUMNS} FROM read_parquet($files)
WHERE execution_id = $execution AND event_id > $after
ORDER BY event_id
LIMIT $most
"""  # noqa: S608 - a constant

_RECORDED_AS = f"""
SELECT {event_read.COLUMNS} FROM read_parquet($files)
WHERE execution_id = $execution AND event_id = $ref AND result IS NOT NULL
"""  # noqa: S608 - a constant

_REFERRING_TO = f"""
SELECT {event_read.COLUMNS} FROM read_parquet($files)
WHERE execution_id = $execution AND result IS NOT NULL AND iter_index IS NULL
  AND event_type IN {event_read.ENDS_OF_CALLS}
  AND CAST(json_extract_string(result, '$.reference.ref_id') AS BIGINT) = $ref
ORDER BY event_type = 'step.exit', event_id DESC
LIMIT 1
"""  # noqa: S608 - a constant

_LAST = """
SELECT iter_index, event_id, result,
       event_type IN ('call.done', 'loop.shard.done', 'retry.completed') AS is_done,
       coalesce(json_exists(context, '$.again'), false) AS has_again,
       event_type = 'retry.completed'
           OR coalesce(CAST(json_extract_string(context, '$.frame_rows') AS INTEGER), 0) > 0
           AS is_frame
FROM read_parquet($files)
WHERE execution_id = $execution
  AND loop_id IN (SELECT CAST(unnest(string_split($loops, ',')) AS BIGINT))
  AND iter_index >= $start AND iter_index < $stop
  AND event_type IN (
    'call.done', 'call.error', 'loop.shard.done', 'loop.shard.failed', 'command.expired',
    'retry.completed'
  )
QUALIFY row_number() OVER (PARTITION BY iter_index ORDER BY event_id DESC) = 1
"""

# `json_extract_string` is the ->> of Postgres: what is null in the document is NULL, and no text.
_OF_LOOP = f"""
SELECT iter_index, event_id, is_done, is_frame,
       CASE WHEN is_done THEN json_extract_string(result, '$.reference') END AS reference,
       coalesce(CAST(json_extract_string(result, '$.reference.bytes') AS BIGINT), 0) AS bytes
FROM ({_LAST}) WHERE NOT has_again
ORDER BY iter_index
"""  # noqa: S608 - a constant

# What `store.loop_result` asks the database; pages are in the database, and weighed there.
_WEIGHED = f"""
SELECT CAST(coalesce(sum(coalesce(r.bytes, CASE WHEN kind <> 'pages' THEN item.bytes END)), 0)
           AS BIGINT) AS bytes,
       list(reference) FILTER (r.ref_id IS NULL AND kind IN ('pages', 'eventlog')) AS behind
FROM (
    SELECT event_id, json_extract_string(result, '$.reference') AS reference,
           json_extract_string(result, '$.reference.type') AS kind,
           CAST(json_extract_string(result, '$.reference.bytes') AS BIGINT) AS bytes
    FROM ({_LAST}) WHERE is_done AND NOT has_again
) AS item
LEFT JOIN %s AS r ON r.ref_id = item.event_id
"""  # noqa: S608 - a constant
_WEIGHT = _WEIGHED % (
    "(SELECT ref_id, bytes FROM read_parquet($more) WHERE execution_id = $execution)"
)
_WEIGHT_WITHOUT_RESULTS = _WEIGHED % (
    "(SELECT CAST(NULL AS BIGINT) AS ref_id, CAST(NULL AS BIGINT) AS bytes)"
)

_LAST_INDEX = """
SELECT coalesce(max(iter_index), -1) AS last FROM read_parquet($files)
WHERE execution_id = $execution
  AND loop_id IN (SELECT CAST(unnest(string_split($loops, ',')) AS BIGINT))
"""

# Rows are in the order of their keys: between the least and the greatest there is little else.
_FIND = """
SELECT ref_id, store_tier, physical_uri, media_type, bytes, sha256,
       CASE WHEN bytes <= $inline_max THEN inline END AS inline, expires_at,
       removed_at IS NOT NULL AS is_removed
FROM read_parquet($files)
WHERE execution_id = $execution AND ref_id >= $least AND ref_id <= $greatest
  AND ref_id IN (SELECT CAST(unnest(string_split($refs, ',')) AS BIGINT))
"""


def _stored(row: Row) -> StoredRow:
    return StoredRow(
        row["store_tier"],
        row["physical_uri"],
        row["media_type"],
        row["bytes"],
        row["sha256"],
        row["inline"],
        None if row["expires_at"] is None else _moment(row["expires_at"]),
        row["is_removed"],
    )


def _in_portions(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """As many at a time as may be in memory together."""
    first, size = 0, 0
    for n, row in enumerate(rows):
        size += min(row["bytes"], INLINE_BYTES_MAX)
        if size > ARCHIVED_BYTES_AT_ONCE or n - first >= ARCHIVED_RESULTS_AT_ONCE:
            yield rows[first:n]
            first, size = n, min(row["bytes"], INLINE_BYTES_MAX)
    if first < len(rows):
        yield rows[first:]


def _listed(ids: Sequence[int]) -> str:
    """DuckDB takes milliseconds for every element of a list that Python gives it: give it text."""
    return ",".join(map(str, ids))


def _ended(row: Row, results: Mapping[RefId, StoredRow]) -> Ended:
    """What `loop_result.of_loop` makes of the same events."""
    stored = results.get(RefId(row["event_id"])) if row["is_done"] else None
    reference = None if stored is not None or row["reference"] is None else row["reference"]
    return Ended(
        row["iter_index"],
        EventId(row["event_id"]),
        row["is_done"],
        row["is_frame"],
        stored,
        None if reference is None else _decode_reference(reference),
    )


def _has_again(context: str | None) -> bool:
    return context is not None and "again" in json.loads(context)


def _moment(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC)
