"""Copies of files in S3: made once, checked, bounded, and never taken from who reads them."""

import asyncio
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.local_copies import CopyDamagedError, LocalCopies
from noetl_core.store.archive import File

SIZE = 100


class Origin:
    """Gives the bytes of a name, when it may."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.may_go = asyncio.Event()
        self.may_go.set()
        self.error: Exception | None = None

    async def fetch(self, file: File, target: Path) -> str:
        self.fetched.append(file.path)
        await self.may_go.wait()
        if self.error is not None:
            raise self.error
        await asyncio.to_thread(target.write_bytes, body_of(file.path))
        return hashlib.sha256(body_of(file.path)).hexdigest()


def body_of(name: str) -> bytes:
    return name.encode().ljust(SIZE)


def a_file(name: str, *, sha256: str = "") -> File:
    digest = sha256 or hashlib.sha256(body_of(name)).hexdigest()
    return File(source="event", path=name, rows=1, bytes=SIZE, sha256=digest, lower=1, upper=1)


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.fixture
def copies(origin: Origin, tmp_path: Path) -> Iterator[LocalCopies]:
    opened = LocalCopies(origin.fetch, parent=tmp_path, bytes_max=3 * SIZE)
    yield opened
    opened.close()
    assert list(tmp_path.iterdir()) == []


async def read(copies: LocalCopies, *names: str) -> list[bytes]:
    async with copies.at_hand([a_file(name) for name in names]) as paths:
        return [path.read_bytes() for path in paths]


def on_disk(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))


def the_directory(tmp_path: Path) -> Path:
    return next(path for path in tmp_path.iterdir() if path.is_dir())


async def test_many_readers_of_one_file_copy_it_once(copies: LocalCopies, origin: Origin) -> None:
    origin.may_go.clear()
    readers = [asyncio.create_task(read(copies, "a", "b")) for _ in range(20)]
    await asyncio.sleep(0)
    origin.may_go.set()

    for found in await asyncio.gather(*readers):
        assert found == [body_of("a"), body_of("b")]
    assert sorted(origin.fetched) == ["a", "b"]


async def test_what_was_read_longest_ago_goes_first(
    copies: LocalCopies, origin: Origin, tmp_path: Path
) -> None:
    for name in ("a", "b", "c", "a", "d"):
        await read(copies, name)
    await read(copies, "a")
    await read(copies, "b")

    assert origin.fetched == ["a", "b", "c", "d", "b"]
    assert on_disk(tmp_path) == 3 * SIZE


async def test_what_somebody_reads_stays(copies: LocalCopies, tmp_path: Path) -> None:
    async with copies.at_hand([a_file("a")]) as (path,):
        for name in ("b", "c", "d", "e"):
            await read(copies, name)

        assert path.read_bytes() == body_of("a")
        assert on_disk(tmp_path) == 3 * SIZE


async def test_whoever_needs_more_room_waits_for_those_who_read(
    copies: LocalCopies, tmp_path: Path
) -> None:
    async with copies.at_hand([a_file("a"), a_file("b")]):
        waiting = asyncio.create_task(read(copies, "c", "d"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert on_disk(tmp_path) == 2 * SIZE

    assert await waiting == [body_of("c"), body_of("d")]
    assert on_disk(tmp_path) <= 3 * SIZE


async def test_one_that_needs_more_than_all_room_gets_it_when_it_is_alone(
    copies: LocalCopies, tmp_path: Path
) -> None:
    names = ["a", "b", "c", "d", "e"]

    assert await read(copies, *names) == [body_of(name) for name in names]
    assert on_disk(tmp_path) == 3 * SIZE


async def test_an_error_is_told_to_all_who_wait_and_the_next_tries_again(
    copies: LocalCopies, origin: Origin
) -> None:
    origin.error = StoreAwayError("away")
    origin.may_go.clear()
    readers = [asyncio.create_task(read(copies, "a")) for _ in range(5)]
    await asyncio.sleep(0)
    origin.may_go.set()
    told = await asyncio.gather(*readers, return_exceptions=True)
    origin.error = None

    assert [type(error) for error in told] == [StoreAwayError] * 5
    assert origin.fetched == ["a"]
    assert await read(copies, "a") == [body_of("a")]


async def test_a_reader_that_goes_away_takes_nothing_from_the_others(
    copies: LocalCopies, origin: Origin
) -> None:
    origin.may_go.clear()
    leaving, staying = (asyncio.create_task(read(copies, "a")) for _ in range(2))
    await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.sleep(0.01)
    origin.may_go.set()

    assert await staying == [body_of("a")]
    assert origin.fetched == ["a"]


async def test_bytes_that_are_not_those_that_were_archived_are_not_read(
    copies: LocalCopies, tmp_path: Path
) -> None:
    with pytest.raises(CopyDamagedError, match="a is not what was archived"):
        async with copies.at_hand([a_file("a", sha256="0" * 64)]):
            pass

    assert on_disk(tmp_path) == 0


async def test_a_full_disk_is_an_error_that_passes(copies: LocalCopies, origin: Origin) -> None:
    origin.error = OSError(28, "No space left on device")

    with pytest.raises(StoreAwayError, match="No space left"):
        await read(copies, "a")


async def test_a_copy_that_was_tidied_away_is_made_again(
    copies: LocalCopies, origin: Origin, tmp_path: Path
) -> None:
    await read(copies, "a")
    shutil.rmtree(the_directory(tmp_path))

    assert await read(copies, "a") == [body_of("a")]
    assert origin.fetched == ["a", "a"]
