"""ResultStore: every result goes in before anything is said about it, and comes out by reference.

    put   worker, gateway, broker   a document becomes `Stored`: inline bytes, or a place in a tier
    get   worker, broker, gateway   a reference becomes the document, checked by its digest

What a loop or a sequence of pages returned is put together from many results (aggregates.py).
Small payloads are not written here at all: they ride with the message, and the broker inserts them
in the commit that records their event, so a reference never dangles. Large ones are safe in their
tier before `put` returns. What `get` gives may be shared with others: read it, do not change it.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from noetl_core.blob.aggregates import Aggregates
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.cache import NEVER_CACHED, DocumentCache
from noetl_core.blob.chain import Chain, Kept
from noetl_core.blob.documents import JSON, Documents, decoded
from noetl_core.blob.file_tier import FileTier
from noetl_core.blob.history import History
from noetl_core.blob.metrics import RESOLVE_MS
from noetl_core.blob.place import Place
from noetl_core.blob.tier import (
    S3_TIERS,
    ReferenceNotAvailableError,
    ResultTooLargeError,
    Tier,
)
from noetl_core.domain.envelope import INLINE_BYTES_MAX, Reference
from noetl_core.domain.ids import EventId, ExecutionId, LoopId
from noetl_core.domain.pages import PageRule
from noetl_core.domain.result_view import STEP_DOCUMENT_MEDIA_TYPE, StepDocument, value_of
from noetl_core.store import loop_result, manifest
from noetl_core.store.postgres import Connection, Pool
from noetl_core.store.result_ref import StoredRow
from noetl_core.wire.messages import Stored

CACHE_BYTES_DEFAULT = 64 * 1024 * 1024
DB_BYTES_MAX = 16 * 1024 * 1024
"""The largest payload that may go into the database when there is no other tier."""

_ABSENT: Final = object()
_NOTHING_FRESH: Final[Mapping[int, Any]] = MappingProxyType({})

_encode = msgspec.json.Encoder().encode


class Resolved(NamedTuple):
    """What an iteration returned, where somebody has it at hand already."""

    document: Any


class ResultStore:
    def __init__(
        self,
        *,
        store_dir: str = "",
        objects: Tier | None = None,
        default_tier: str = "",
        archives: Place | None = None,
        cache_bytes: int = CACHE_BYTES_DEFAULT,
    ) -> None:
        """`objects` is a tier in S3. `default_tier` is where large results go, if they can."""
        self._tiers = tiers_of(store_dir, objects)
        self._large = Chain(_in_order(self._tiers, default_tier))
        self.history = History(archives)
        self._documents = Documents(self._tiers, self.history)
        self._aggregates = Aggregates(self._documents, self.history)
        self._cache = DocumentCache(cache_bytes)
        self._reading: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def has_tier(self, name: str) -> bool:
        return name == "db" or name in self._tiers

    async def put(
        self,
        execution_id: ExecutionId,
        name: str,
        document: Any,
        *,
        media_type: str = JSON,
        tier: str | None = None,
    ) -> Stored:
        """Make a document ready to be recorded; bytes are kept as they are.

        `name` is the command's id, or any other that a retry repeats. `tier` is where it must go;
        without one its size decides. Raises ResultTooLargeError, StoreAwayError, and TypeError for
        what is no data.
        """
        body = document if isinstance(document, bytes) else _encode(document)
        if isinstance(document, StepDocument):
            media_type = STEP_DOCUMENT_MEDIA_TYPE
        kept = await self._kept(execution_id, name, body, tier)
        return Stored(
            tier="db" if kept is None else kept.tier,
            size=len(body),
            sha256=hashlib.sha256(body).digest(),
            inline=body if kept is None else None,
            uri=None if kept is None else kept.uri,
            media_type=media_type,
        )

    async def _kept(
        self, execution_id: ExecutionId, name: str, body: bytes, tier: str | None
    ) -> Kept | None:
        """Where a tier has put it; None for the database. What must go somewhere goes there."""
        if tier in self._tiers:
            return Kept(tier, await self._tiers[tier].put(execution_id, name, body))
        if tier is None and len(body) > INLINE_BYTES_MAX:
            kept = await self._large.put(execution_id, name, body)
            if kept is not None:
                return kept
        if len(body) <= DB_BYTES_MAX:
            return None
        if tier is None and self._large.why:
            # One that is away may take it later: that is no reason to give up on the result.
            raise StoreAwayError(self._large.why)
        raise ResultTooLargeError(bytes_=len(body), bytes_max=DB_BYTES_MAX)

    async def get(
        self, conn: Connection | Pool, execution_id: ExecutionId, reference: Reference
    ) -> Any:
        """The document behind a reference; of a loop or of pages, what they returned together.

        A reference that names an execution belongs to that one, whoever asks.
        """
        begun = time.perf_counter()
        tier, document = await self._resolved(
            conn, reference.execution_id or execution_id, reference
        )
        RESOLVE_MS.record((time.perf_counter() - begun) * 1000, {"tier": tier})
        return document

    async def _resolved(
        self, conn: Connection | Pool, owner: ExecutionId, reference: Reference
    ) -> tuple[str, Any]:
        """Where it was, and the document."""
        if reference.type == "eventlog":
            loop_id = LoopId(reference.ref_id)
            return "eventlog", await self.results_of_loop(conn, owner, loop_id)
        if reference.type == "pages":
            return "pages", await self.pages(conn, owner, EventId(reference.ref_id))

        tier = "cache"

        async def read() -> tuple[Any, int]:
            nonlocal tier
            row = await self._documents.find(conn, owner, reference.ref_id)
            tier = row.tier
            size = row.size if row.expires_at is None else NEVER_CACHED
            return await self._documents.read(owner, row), size

        document = await self._once((owner, reference.ref_id), read)
        return tier, document

    async def values(
        self, conn: Connection | Pool, execution_id: ExecutionId, references: Sequence[Reference]
    ) -> list[Any]:
        """What is behind many references, with few statements; it is not kept."""
        numbered = dict(enumerate(references))
        begun = time.perf_counter()
        found = await self._aggregates.resolve(conn, execution_id, numbered)
        RESOLVE_MS.record((time.perf_counter() - begun) * 1000, {"tier": "many"})
        return [found[number].value for number in numbered]

    async def file_of(
        self, conn: Connection | Pool, execution_id: ExecutionId, reference: Reference
    ) -> Path | None:
        """The file of a result, for a tool that reads it in place; None if it lies in none."""
        if reference.type not in {"db", "object_store"}:
            return None
        owner = reference.execution_id or execution_id
        row = await self._documents.find(conn, owner, reference.ref_id)
        tier = self._tiers.get(row.tier)
        return tier.path(row.uri) if isinstance(tier, FileTier) and row.uri else None

    async def results_of_loop(
        self,
        conn: Connection | Pool,
        execution_id: ExecutionId,
        loop_id: LoopId,
        *,
        fresh: Mapping[int, Stored | Resolved] = _NOTHING_FRESH,
        base: LoopId | None = None,
    ) -> list[Any]:
        """What each iteration of a finished loop returned, in order; None for one that failed.

        Of a cursor: what its frames returned, without those that claimed no rows. `fresh`: by
        index, what is on its way into the database and cannot be read there yet. `base`: what the
        loop goes on with, where the manifest that says so is on its way too.
        """
        key = (execution_id, loop_id)
        if fresh or base is not None:
            values = {
                index: value_of(await self._fresh(execution_id, item))
                for index, item in fresh.items()
            }
            results, _ = await self._aggregates.loop(conn, *key, fresh=values, base=base)
        else:
            results = await self._once((*key, "results"), lambda: self._aggregates.loop(conn, *key))
        found: list[Any] = results
        return found

    async def undone_of_loop(
        self, conn: Connection | Pool, execution_id: ExecutionId, loop_id: LoopId
    ) -> list[int]:
        """The items that have not ended well, in this activation or in what it goes on with."""
        loop = await manifest.activations(conn, execution_id, loop_id)
        if not loop.total:
            return []
        return await loop_result.undone(conn, execution_id, loop.loop_ids, total=loop.total)

    async def pages(
        self,
        conn: Connection | Pool,
        execution_id: ExecutionId,
        sequence: EventId,
        *,
        fresh: Mapping[int, Stored] = _NOTHING_FRESH,
        rule: tuple[str, str] | None = None,
    ) -> Any:
        """What the pages of a sequence come to together.

        `fresh`: by index, from 0, the pages that cannot be read in the database yet. `rule`:
        `collect` and `merge_path`, where the manifest that says so is on its way too.
        """
        key = (execution_id, sequence)
        if not fresh and rule is None:
            return await self._once((*key, "pages"), lambda: self._aggregates.pages(conn, *key))
        documents = {i: await self.read_stored(execution_id, item) for i, item in fresh.items()}
        own_rule = None if rule is None else PageRule(*rule)
        return await self._aggregates.pages_with(conn, *key, fresh=documents, rule=own_rule)

    async def page_rule(
        self, conn: Connection | Pool, execution_id: ExecutionId, sequence: EventId
    ) -> PageRule:
        return await self._aggregates.rule(conn, execution_id, sequence)

    def each_page(
        self, conn: Connection | Pool, execution_id: ExecutionId, sequence: EventId
    ) -> AsyncIterator[Any]:
        """The documents of the pages, read while they are asked for; None for an empty page."""
        return self._aggregates.each_page(conn, execution_id, sequence)

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
        return await self._documents.read(execution_id, row)

    async def part(
        self, conn: Connection | Pool, execution_id: ExecutionId, loop_id: LoopId, part: int
    ) -> list[Any]:
        """One stored piece of the collection of a loop."""

        async def read() -> tuple[Any, int]:
            row = await manifest.part(conn, execution_id, loop_id, part_index=part)
            if row is None:
                raise ReferenceNotAvailableError(
                    f"part {part} of collection {loop_id} is gone", execution_id=execution_id
                )
            items = await self._documents.read(execution_id, row)
            assert isinstance(items, list), (execution_id, loop_id, part)
            return items, row.size

        found: list[Any] = await self._once((execution_id, loop_id, part), read)
        return found

    async def _fresh(self, execution_id: ExecutionId, item: Stored | Resolved) -> Any:
        if isinstance(item, Resolved):
            return item.document
        return await self.read_stored(execution_id, item)

    async def _once(self, key: Hashable, read: Callable[[], Awaitable[tuple[Any, int]]]) -> Any:
        """From the cache, or read: sixteen iterations that want the same document read it once."""
        async with self._lock(key):
            document = self._cache.get(key, _ABSENT)
            if document is _ABSENT:
                document, size = await read()
                self._cache.put(key, document, size)
        return document

    def _lock(self, key: Hashable) -> asyncio.Lock:
        lock = self._reading.get(key)
        if lock is None:
            lock = self._reading[key] = asyncio.Lock()
        return lock


def document_of(stored: Stored) -> Any:
    """The document of a small result that is still on its way to the database."""
    assert stored.inline is not None, stored.uri
    return decoded(stored.media_type, stored.inline)


def tiers_of(store_dir: str, objects: Tier | None) -> dict[str, Tier]:
    """By the names that rows may have."""
    tiers: dict[str, Tier] = {"pvc": FileTier(store_dir)} if store_dir else {}
    if objects is not None:
        tiers |= dict.fromkeys(S3_TIERS, objects)
    return tiers


def _in_order(tiers: Mapping[str, Tier], default: str) -> list[Tier]:
    """The one that is wanted, then the others. In the database only what nobody else takes."""
    if default == "db":
        return []
    wanted = [tiers[default]] if default in tiers else []
    others = [tier for tier in tiers.values() if tier not in wanted]
    return list(dict.fromkeys([*wanted, *others]))
