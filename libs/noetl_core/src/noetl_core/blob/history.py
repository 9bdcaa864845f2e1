"""The log and the results of an execution, wherever they are by now.

They are in Postgres until their archive has taken their place, and then in its files: all rows of
an execution change over in one commit. So every question goes to Postgres first, and only where
it has no answer to the archives; the answer is the same.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
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

_DONE = frozenset({"call.done", "loop.shard.done", "retry.completed"})


class ArchiveUnavailableError(NotFoundError):
    """The execution is in an archive that cannot be read from here."""


class Files(NamedTuple):
    """Those that may hold rows of one execution."""

    event: list[File]
    result_ref: list[File]


class History:
    def __init__(self, archives: Place | None = None) -> None:
        self._archives = archives
        self._duckdb: duckdb.DuckDBPyConnection | None = None

    async def is_archived(self, conn: Connection | Pool, execution_id: ExecutionId) -> bool:
        """Recorded in an archive: from then on its log must not go on."""
        return bool(await archive.files_of(conn, execution_id))

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
        if not files.event:
            return []
        values = {"execution": execution_id, "loops": list(loop_ids), "start": start, "stop": stop}
        rows = await self._ask(_OF_LOOP, files.event, **values)
        last = [row for row in rows if not _has_again(row["context"])]
        done = [RefId(row["event_id"]) for row in last if row["event_type"] in _DONE]
        results = await self._archived_results(conn, execution_id, done)
        return [_ended(row, results) for row in last]

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
        values = {"execution": execution_id, "loops": list(loop_ids)}
        rows = await self._ask(_LAST_INDEX, files.event, **values)
        return int(rows[0]["last"])

    async def weight(
        self, conn: Connection | Pool, execution_id: ExecutionId, loop_ids: Sequence[LoopId]
    ) -> Weight:
        """How much the results of a loop weigh together."""
        weight = await loop_result.weight(conn, execution_id, loop_ids)
        if weight.bytes or weight.loops:
            return weight
        items = [i for i in await self.of_loop(conn, execution_id, loop_ids) if i.is_done]
        size = 0
        for item in items:
            reference = item.reference
            if item.row is not None:
                size += item.row.size
            elif reference is not None and reference.type == "pages":
                owner = reference.execution_id or execution_id
                size += await manifest.pages_bytes(conn, owner, EventId(reference.ref_id))
            elif reference is not None:
                size += reference.bytes
        loops = [i.reference for i in items if i.reference and i.reference.type == "eventlog"]
        return Weight(size, loops)

    async def _archived_results(
        self, conn: Connection | Pool, execution_id: ExecutionId, ref_ids: Sequence[RefId]
    ) -> dict[RefId, StoredRow]:
        if not ref_ids:
            return {}
        files = await self._files(conn, execution_id)
        if not files.result_ref:
            return {}
        values = {"execution": execution_id, "refs": list(ref_ids)}
        rows = await self._ask(_FIND, files.result_ref, **values)
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

    async def _ask(self, query: str, files: Sequence[File], **values: Any) -> list[dict[str, Any]]:
        assert self._archives is not None, files
        try:
            async with self._archives.at_hand(files) as paths:
                return await asyncio.to_thread(self._ask_now, query, paths, values)
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

_OF_LOOP = """
SELECT iter_index, event_id, event_type, context, result FROM read_parquet($files)
WHERE execution_id = $execution AND list_contains($loops, loop_id)
  AND iter_index >= $start AND iter_index < $stop
  AND event_type IN (
    'call.done', 'call.error', 'loop.shard.done', 'loop.shard.failed', 'command.expired',
    'retry.completed'
  )
QUALIFY row_number() OVER (PARTITION BY iter_index ORDER BY event_id DESC) = 1
ORDER BY iter_index
"""

_LAST_INDEX = """
SELECT coalesce(max(iter_index), -1) AS last FROM read_parquet($files)
WHERE execution_id = $execution AND list_contains($loops, loop_id)
"""

_FIND = """
SELECT ref_id, store_tier, physical_uri, media_type, bytes, sha256, inline, expires_at
FROM read_parquet($files)
WHERE execution_id = $execution AND list_contains($refs, ref_id)
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
    )


def _ended(row: Row, results: Mapping[RefId, StoredRow]) -> Ended:
    """What `loop_result.of_loop` makes of the same events."""
    is_done = row["event_type"] in _DONE
    context = {} if row["context"] is None else json.loads(row["context"])
    stored = results.get(RefId(row["event_id"])) if is_done else None
    if stored is not None and stored.size > INLINE_BYTES_MAX:
        stored = stored._replace(inline=None)
    return Ended(
        row["iter_index"],
        EventId(row["event_id"]),
        is_done,
        row["event_type"] == "retry.completed" or (context.get("frame_rows") or 0) > 0,
        stored,
        _reference(row["result"]) if is_done and stored is None else None,
    )


def _reference(result: str | None) -> Reference | None:
    found = None if result is None else json.loads(result).get("reference")
    return None if found is None else msgspec.convert(found, Reference)


def _has_again(context: str | None) -> bool:
    return context is not None and "again" in json.loads(context)


def _moment(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC)
