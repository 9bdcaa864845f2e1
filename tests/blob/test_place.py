"""A place is a place: the directory and the bucket do the same."""

import asyncio
import hashlib
import sys
from pathlib import Path

import pytest

from noetl_core.blob.place import Place
from noetl_core.store.archive import File


async def put(place: Place, name: str, body: bytes) -> File:
    with place.scratch() as directory:
        file = directory / "made"
        file.write_bytes(body)
        await place.put(name, file)
        assert not file.exists()
    return File(
        source="event",
        path=name,
        rows=1,
        bytes=len(body),
        sha256=hashlib.sha256(body).hexdigest(),
        lower=1,
        upper=1,
    )


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
async def test_what_was_put_is_given_back(place: Place, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

    file = await put(place, "a/b.parquet", body)

    assert await place.digest("a/b.parquet") == file.sha256
    assert await place.read("a/b.parquet") == body
    async with place.at_hand([file, file]) as (first, second):
        assert first.read_bytes() == second.read_bytes() == body


async def test_a_name_that_is_put_again_is_replaced(place: Place) -> None:
    await place.write("a", b"before")
    await place.write("a", b"after")

    assert await place.read("a") == b"after"


async def test_names_are_listed_by_prefix_and_in_order(place: Place) -> None:
    for name in ("b/2", "b/1", "bc/1", "a/deep/er"):
        await place.write(name, b"")

    assert await place.names() == ["a/deep/er", "b/1", "b/2", "bc/1"]
    assert await place.names("b/") == ["b/1", "b/2"]
    assert await place.names("nothing/") == []


@pytest.mark.slow
async def test_more_names_than_one_answer_holds_are_all_listed(place: Place) -> None:
    names = [f"many/{number:04}" for number in range(1005)]
    for first in range(0, len(names), 50):
        await asyncio.gather(*(place.write(name, b"") for name in names[first : first + 50]))

    assert await place.names("many/") == names


async def test_what_is_deleted_is_gone_and_the_rest_is_not(place: Place) -> None:
    await place.write("a/1", b"1")
    await place.write("a/2", b"2")

    await place.delete("a/1")
    await place.delete("a/1")

    assert await place.names() == ["a/2"]
    with pytest.raises(FileNotFoundError):
        await place.read("a/1")


async def test_what_is_not_there_is_not_found(place: Place) -> None:
    missing = await put(place, "here", b"x")
    await place.delete("here")

    for ask in (place.read, place.digest):
        with pytest.raises(FileNotFoundError):
            await ask("here")
    with pytest.raises(FileNotFoundError):
        async with place.at_hand([missing]):
            pass


async def test_nothing_that_is_being_made_is_listed(place: Place) -> None:
    with place.scratch() as directory:
        (directory / "half").write_bytes(b"x")

        assert await place.names() == []

    assert not directory.exists()


async def test_a_name_with_a_quote_and_a_blank_is_a_name(place: Place) -> None:
    await place.write("it's/a b+c%20d", b"x")

    assert await place.names() == ["it's/a b+c%20d"]
    assert await place.read("it's/a b+c%20d") == b"x"


async def test_a_file_that_is_put_survives_the_directory_it_was_made_in(
    place: Place, tmp_path: Path
) -> None:
    source = tmp_path / "elsewhere"
    source.write_bytes(b"x")

    await place.put("deep/er/name", source)

    assert await place.read("deep/er/name") == b"x"


async def test_two_containers_that_write_the_same_file_do_not_meet_halfway(tmp_path: Path) -> None:
    """Each of them runs as process 1, and both have just started."""
    script = (
        "import os, pathlib; os.getpid = lambda: 1\n"
        "from noetl_core.blob import durable\n"
        "print(durable._temporary(pathlib.Path('file')).name)"
    )

    async def name() -> bytes:
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
        )
        return (await made.communicate())[0]

    first, second = await name(), await name()

    assert first.endswith(b".tmp\n")
    assert first != second
