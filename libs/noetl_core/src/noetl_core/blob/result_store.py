"""ResultStore: every result goes in before anything is said about it, and comes out by reference.

    put   worker, gateway, broker   a document becomes `Stored`: inline bytes, or a place in a tier
    get   worker, broker, gateway   a reference becomes the document, checked by its digest

Small payloads are not written here at all: they ride with the message, and the broker inserts them
in the commit that records their event, so a reference never dangles. Large ones are safe in their
tier before `put` returns. What `get` gives may be shared with others: read it, do not change it.
"""

import asyncio
import hashlib
from collections.abc import Hashable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from noetl_core.blob.cache import DocumentCache
from noetl_core.blob.file_tier import FileTier
from noetl_core.blob.tier import ReferenceNotAvailableError, ResultTooLargeError, Tier
from noetl_core.domain.envelope import INLINE_BYTES_MAX, Reference
from noetl_core.domain.ids import ExecutionId, LoopId, RefId
from noetl_core.domain.result_view import STEP_DOCUMENT_MEDIA_TYPE, StepDocument, value_of
from noetl_core.store import manifest, result_ref
from noetl_core.store.postgres import Connection, Pool
from noetl_core.store.result_ref import StoredRow
from noetl_core.wire.messages import Stored

JSON = "application/json"
CACHE_BYTES_DEFAULT = 64 * 1024 * 1024
DB_BYTES_MAX = 16 * 1024 * 1024
"""The largest payload that may go into the database when there is no other tier."""

_READS_AT_ONCE = 16
_ABSENT: Final = object()
_NOTHING_FRESH: Final[Mapping[int, Stored]] = MappingProxyType({})

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_decode_step = msgspec.json.Decoder(StepDocument).decode


class ResultStore:
    def __init__(self, *, store_dir: str = "", cache_bytes: int = CACHE_BYTES_DEFAULT) -> None:
        self._large: Tier | None = FileTier(store_dir) if store_dir else None
        self._tiers: dict[str, Tier] = (
            {} if self._large is None else {self._large.name: self._large}
        )
        self._cache = DocumentCache(cache_bytes)
        self._reading: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def put(
        self, execution_id: ExecutionId, name: str, document: Any, *, media_type: str = JSON
    ) -> Stored:
        """Make a document ready to be recorded; bytes are kept as they are.

        `name` is the command's id, or any other that a retry repeats. Raises ResultTooLargeError,
        and TypeError for what is no data.
        """
        body = document if isinstance(document, bytes) else _encode(document)
        if isinstance(document, StepDocument):
            media_type = STEP_DOCUMENT_MEDIA_TYPE
        digest = hashlib.sha256(body).digest()
        large = self._large if len(body) > INLINE_BYTES_MAX else None
        if large is None and len(body) > DB_BYTES_MAX:
            raise ResultTooLargeError(bytes_=len(body), bytes_max=DB_BYTES_MAX)
        return Stored(
            tier="db" if large is None else large.name,
            size=len(body),
            sha256=digest,
            inline=body if large is None else None,
            uri=None if large is None else await large.put(execution_id, name, body),
            media_type=media_type,
        )

    async def get(
        self, conn: Connection | Pool, execution_id: ExecutionId, reference: Reference
    ) -> Any:
        """The document behind a reference; for a loop, its results in order."""
        if reference.type == "eventlog":
            return await self.results_of_loop(conn, execution_id, LoopId(reference.ref_id))
        key = (execution_id, reference.ref_id)
        async with self._lock(key):
            document = self._cache.get(key, _ABSENT)
            if document is _ABSENT:
                row = await self._find(conn, execution_id, reference.ref_id)
                document = await self._read(execution_id, row)
                self._cache.put(key, document, row.size)
        return document

    async def file_of(
        self, conn: Connection | Pool, execution_id: ExecutionId, reference: Reference
    ) -> Path | None:
        """The file of a result, for a tool that reads it in place; None if it lies in none."""
        if reference.type not in {"db", "object_store"}:
            return None
        row = await self._find(conn, execution_id, reference.ref_id)
        tier = self._tiers.get(row.tier)
        return tier.path(row.uri) if isinstance(tier, FileTier) and row.uri else None

    async def results_of_loop(
        self,
        conn: Connection | Pool,
        execution_id: ExecutionId,
        loop_id: LoopId,
        *,
        fresh: Mapping[int, Stored] = _NOTHING_FRESH,
    ) -> list[Any]:
        """What each iteration of a finished loop returned, in order; None for one that failed.

        `fresh`: by index, what is on its way into the database and cannot be read there yet.
        """
        if fresh:
            found, _ = await self._read_loop(conn, execution_id, loop_id)
            for index, stored in fresh.items():
                found[index] = value_of(await self.read_stored(execution_id, stored))
            return found
        key = (execution_id, loop_id, "results")
        async with self._lock(key):
            results: list[Any] | None = self._cache.get(key, None)
            if results is None:
                results, size = await self._read_loop(conn, execution_id, loop_id)
                self._cache.put(key, results, size)
        return results

    async def read_stored(self, execution_id: ExecutionId, stored: Stored) -> Any:
        """The document of a result that is still on its way into the database."""
        row = StoredRow(
            stored.tier,
            stored.uri,
            stored.media_type,
            stored.size,
            stored.sha256,
            stored.inline,
        )
        return await self._read(execution_id, row)

    async def part(
        self, conn: Connection | Pool, execution_id: ExecutionId, loop_id: LoopId, part: int
    ) -> list[Any]:
        """One stored piece of the collection of a loop."""
        key = (execution_id, loop_id, part)
        async with self._lock(key):
            items: list[Any] | None = self._cache.get(key, None)
            if items is None:
                row = await manifest.part(conn, execution_id, loop_id, part_index=part)
                if row is None:
                    raise ReferenceNotAvailableError(
                        f"part {part} of collection {loop_id} is gone", execution_id=execution_id
                    )
                items = await self._read(execution_id, row)
                assert isinstance(items, list), (execution_id, loop_id, part)
                self._cache.put(key, items, row.size)
        return items

    def _lock(self, key: Hashable) -> asyncio.Lock:
        """Sixteen iterations that want the same document read it once."""
        lock = self._reading.get(key)
        if lock is None:
            lock = self._reading[key] = asyncio.Lock()
        return lock

    async def _find(
        self, conn: Connection | Pool, execution_id: ExecutionId, ref_id: RefId
    ) -> StoredRow:
        rows = await result_ref.find(conn, execution_id, [ref_id])
        if ref_id not in rows:
            raise ReferenceNotAvailableError(
                f"result {ref_id} is not stored", execution_id=execution_id
            )
        return rows[ref_id]

    async def _read_loop(
        self, conn: Connection | Pool, execution_id: ExecutionId, loop_id: LoopId
    ) -> tuple[list[Any], int]:
        found = await result_ref.of_loop(conn, execution_id, loop_id)
        count = await manifest.item_count(conn, execution_id, loop_id)
        total = (
            count if count is not None else max((item.iter_index + 1 for item in found), default=0)
        )
        results: list[Any] = [None] * total
        limit = asyncio.Semaphore(_READS_AT_ONCE)

        async def fill(index: int, row: StoredRow) -> None:
            async with limit:
                results[index] = value_of(await self._read(execution_id, row))

        large = []
        for index, row in found:
            if row is not None and row.inline is not None:
                results[index] = value_of(_document(execution_id, row, row.inline))
            elif row is not None:
                large.append(fill(index, row))
        await asyncio.gather(*large)
        return results, sum(row.size for _, row in found if row is not None)

    async def _read(self, execution_id: ExecutionId, row: StoredRow) -> Any:
        if row.inline is not None:
            return _document(execution_id, row, row.inline)
        tier = self._tiers.get(row.tier)
        if tier is None or row.uri is None:
            raise ReferenceNotAvailableError(
                f"it is in the tier {row.tier!r}, which is not configured here",
                execution_id=execution_id,
            )
        try:
            body = await tier.get(row.uri)
        except OSError as error:
            raise ReferenceNotAvailableError(
                f"{row.uri} cannot be read: {error.strerror or error}", execution_id=execution_id
            ) from error
        return _document(execution_id, row, body)


def document_of(stored: Stored) -> Any:
    """The document of a small result that is still on its way to the database."""
    assert stored.inline is not None, stored.uri
    return _decoded(stored.media_type, stored.inline)


def _document(execution_id: ExecutionId, row: StoredRow, body: bytes) -> Any:
    if row.sha256 is not None and hashlib.sha256(body).digest() != row.sha256:
        raise ReferenceNotAvailableError(
            f"the bytes of {row.uri or 'an inline result'} are not those that were stored",
            execution_id=execution_id,
        )
    return _decoded(row.media_type, body)


def _decoded(media_type: str, body: bytes) -> Any:
    if media_type == JSON:
        return _decode(body)
    if media_type == STEP_DOCUMENT_MEDIA_TYPE:
        return _decode_step(body)
    return body
