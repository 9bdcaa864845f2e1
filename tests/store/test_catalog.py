"""A path has versions 1, 2, 3, ... and registering what is there already adds none."""

import asyncio
import hashlib
from itertools import count

from noetl_core.domain.ids import CatalogId
from noetl_core.store import catalog
from noetl_core.store.catalog import Registration
from noetl_core.store.postgres import Pool

_ids = count(1)


async def register(pool: Pool, path: str, content: str) -> Registration:
    async with pool.acquire() as conn, conn.transaction():
        return await catalog.register(
            conn,
            CatalogId(next(_ids)),
            path=path,
            content=content,
            sha256=hashlib.sha256(content.encode()).digest(),
        )


async def test_versions_of_a_path_count_up_from_one(pool: Pool) -> None:
    versions = [(await register(pool, "a", f"v{n}")).entry.version for n in range(3)]

    assert versions == [1, 2, 3]


async def test_unchanged_content_keeps_its_version_and_its_id(pool: Pool) -> None:
    first = await register(pool, "a", "same")

    again = await register(pool, "a", "same")

    assert first.created
    assert not again.created
    assert again.entry == first.entry


async def test_content_of_an_older_version_becomes_the_newest_again(pool: Pool) -> None:
    for content in ("old", "new"):
        await register(pool, "a", content)

    back = await register(pool, "a", "old")

    assert back.created
    assert back.entry.version == 3


async def test_the_same_content_under_two_paths_is_two_playbooks(pool: Pool) -> None:
    one, two = await register(pool, "a", "same"), await register(pool, "b", "same")

    assert (one.entry.version, two.entry.version) == (1, 1)
    assert one.entry.catalog_id != two.entry.catalog_id


async def test_concurrent_registrations_never_give_two_rows_the_same_version(pool: Pool) -> None:
    registered = await asyncio.gather(*(register(pool, "a", f"text {n}") for n in range(15)))

    assert sorted(one.entry.version for one in registered) == list(range(1, 16))


async def test_the_same_content_registered_at_once_is_one_version(pool: Pool) -> None:
    registered = await asyncio.gather(*(register(pool, "a", "same") for _ in range(15)))

    assert {one.entry.version for one in registered} == {1}
    assert sum(one.created for one in registered) == 1


async def test_without_a_version_the_newest_is_found(pool: Pool) -> None:
    for content in ("one", "two"):
        await register(pool, "a", content)

    newest = await catalog.read(pool, "a")
    first = await catalog.read(pool, "a", version=1)

    assert newest is not None
    assert first is not None
    assert (newest.version, newest.content) == (2, "two")
    assert (first.version, first.content) == (1, "one")
    assert await catalog.find(pool, "a", version=3) is None
    assert await catalog.find(pool, "b") is None


async def test_content_is_found_by_catalog_id(pool: Pool) -> None:
    entry = (await register(pool, "a", "text")).entry

    assert await catalog.content_of(pool, entry.catalog_id) == "text"
    assert await catalog.content_of(pool, CatalogId(0)) is None


async def test_the_list_has_the_newest_version_of_each_path_in_pages(pool: Pool) -> None:
    for path in ("c", "a", "b"):
        for content in ("one", "two"):
            await register(pool, path, content)

    first = await catalog.newest_of_each(pool, after_path="", limit=2)
    rest = await catalog.newest_of_each(pool, after_path=first[-1].path, limit=2)

    assert [(entry.path, entry.version) for entry in first + rest] == [("a", 2), ("b", 2), ("c", 2)]
