"""Rows into documents: the bytes from their tier, checked by their digest, decoded."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from noetl_core.blob.history import History
from noetl_core.blob.tier import ReferenceNotAvailableError, Tier
from noetl_core.domain.ids import ExecutionId, RefId
from noetl_core.domain.result_view import STEP_DOCUMENT_MEDIA_TYPE, StepDocument
from noetl_core.store.postgres import Connection, Pool
from noetl_core.store.result_ref import ResultKey, StoredRow

JSON = "application/json"
ROWS_AT_ONCE = 300
BYTES_AT_ONCE = 8 * 1024 * 1024
"""What one statement brings, unless a single document is larger."""

_READS_AT_ONCE = 16

_decode = msgspec.json.Decoder().decode
_decode_step = msgspec.json.Decoder(StepDocument).decode


class Wanted(NamedTuple):
    key: ResultKey
    size: int


class Documents:
    def __init__(self, tiers: Mapping[str, Tier], history: History) -> None:
        self._tiers = tiers
        self._history = history

    async def find(
        self, conn: Connection | Pool, execution_id: ExecutionId, ref_id: RefId
    ) -> StoredRow:
        rows = await self._history.find(conn, execution_id, [ref_id])
        if ref_id not in rows:
            raise _not_stored(execution_id, ref_id)
        return rows[ref_id]

    async def read(self, execution_id: ExecutionId, row: StoredRow) -> Any:
        check_time(execution_id, row)
        if row.inline is not None:
            return document_in(execution_id, row, row.inline)
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
        return document_in(execution_id, row, body)

    async def read_each(self, rows: Sequence[tuple[ExecutionId, StoredRow]]) -> list[Any]:
        """In their order, a few at a time."""
        limit = asyncio.Semaphore(_READS_AT_ONCE)

        async def read(execution_id: ExecutionId, row: StoredRow) -> Any:
            async with limit:
                return await self.read(execution_id, row)

        return await asyncio.gather(*(read(*row) for row in rows))

    async def stream(self, conn: Connection | Pool, wanted: Sequence[Wanted]) -> AsyncIterator[Any]:
        """The documents in the order they are wanted in; in memory are those of one statement."""
        for batch in _batches(wanted):
            rows = await self._history.find_each(conn, batch)
            for key in batch:
                if key not in rows:
                    raise _not_stored(*key)
            for document in await self.read_each([(key[0], rows[key]) for key in batch]):
                yield document


def _batches(wanted: Sequence[Wanted]) -> Iterator[list[ResultKey]]:
    batch: list[ResultKey] = []
    size = 0
    for item in wanted:
        if batch and (len(batch) == ROWS_AT_ONCE or size + item.size > BYTES_AT_ONCE):
            yield batch
            batch, size = [], 0
        batch.append(item.key)
        size += item.size
    if batch:
        yield batch


def _not_stored(execution_id: ExecutionId, ref_id: RefId) -> ReferenceNotAvailableError:
    return ReferenceNotAvailableError(f"result {ref_id} is not stored", execution_id=execution_id)


def check_time(execution_id: ExecutionId, row: StoredRow) -> None:
    """An expired result is gone for its readers at once, and a little later for good."""
    if row.is_expired:
        assert row.expires_at is not None
        raise ReferenceNotAvailableError(
            f"the result expired at {row.expires_at.isoformat(timespec='seconds')}; "
            "`output.store.ttl` of its step says how long it is kept",
            execution_id=execution_id,
        )


def document_in(execution_id: ExecutionId, row: StoredRow, body: bytes) -> Any:
    check_time(execution_id, row)
    if row.sha256 is not None and hashlib.sha256(body).digest() != row.sha256:
        raise ReferenceNotAvailableError(
            f"the bytes of {row.uri or 'an inline result'} are not those that were stored",
            execution_id=execution_id,
        )
    return decoded(row.media_type, body)


def decoded(media_type: str, body: bytes) -> Any:
    if media_type == JSON:
        return _decode(body)
    if media_type == STEP_DOCUMENT_MEDIA_TYPE:
        return _decode_step(body)
    return body
