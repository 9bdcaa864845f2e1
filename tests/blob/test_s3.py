"""S3: what is not there, what is away, and what is nobody's business."""

import asyncio
import traceback
from pathlib import Path

import pytest

from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.s3 import S3, Location, S3Settings, location_of
from support.s3 import BUCKET, SECRET_KEY, Gate, Mood, S3Server, settings


async def read(s3: S3, key: str, bucket: str = BUCKET) -> bytes:
    body = bytearray()
    await s3.read(bucket, key, body.extend)
    return bytes(body)


async def test_a_bucket_that_is_not_there_is_made_by_the_first_put(s3_server: S3Server) -> None:
    async with S3(settings(s3_server.url)) as s3:
        assert await s3.names("noetl-new", "") == []
        await asyncio.gather(*(s3.put("noetl-new", f"key/{n}", b"x") for n in range(4)))

        assert len(await s3.names("noetl-new", "key/")) == 4


async def test_a_missing_object_and_a_missing_bucket_are_not_the_same(
    s3_server: S3Server,
) -> None:
    async with S3(settings(s3_server.url)) as s3:
        with pytest.raises(FileNotFoundError):
            await read(s3, "nothing")
        with pytest.raises(StoreAwayError, match="NoSuchBucket"):
            await read(s3, "nothing", "noetl-nowhere")


@pytest.mark.parametrize("mood", ["shut", "failing", "dropping", "silent"])
@pytest.mark.slow
async def test_whatever_is_asked_of_an_s3_that_is_away_may_be_asked_later(
    gate: Gate, mood: Mood, s3: S3
) -> None:
    await s3.put(BUCKET, "away", b"x")
    async with S3(settings(gate.url, timeout_seconds=1)) as away:
        await gate.become(mood)
        asked = (
            lambda: away.put(BUCKET, "away", b"y"),
            lambda: read(away, "away"),
            lambda: away.names(BUCKET, ""),
            lambda: away.delete(BUCKET, "away"),
        )
        for ask in asked:
            async with asyncio.timeout(60):
                with pytest.raises(StoreAwayError, match=f"S3 at {gate.url} could not"):
                    await ask()

    assert await read(s3, "away") == b"x"


async def test_a_connection_that_breaks_in_the_middle_is_no_short_object(
    gate: Gate, tmp_path: Path
) -> None:
    file = tmp_path / "large"
    file.write_bytes(b"x" * 30_000_000)
    async with S3(settings(gate.url)) as s3:
        await s3.put(BUCKET, "large", file)
        got = 0

        def take(chunk: bytes) -> None:
            nonlocal got
            got += len(chunk)
            if got > 1_000_000:
                asyncio.run_coroutine_threadsafe(gate.become("shut"), loop).result()

        loop = asyncio.get_running_loop()
        with pytest.raises(StoreAwayError):
            await s3.read(BUCKET, "large", take)

    assert got < 30_000_000


async def test_a_put_that_fails_once_is_sent_again_from_its_beginning(
    gate: Gate, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 20_000)
    gate.failures_left = 1
    async with S3(settings(gate.url)) as s3:
        await s3.put(BUCKET, "again", file)

        assert gate.requests == 2
        assert await read(s3, "again") == file.read_bytes()


async def test_an_error_says_what_to_mend_and_tells_no_secret(s3_server: S3Server) -> None:
    wrong = settings(s3_server.url, secret_key="wrong-and-secret")

    async with S3(wrong) as s3:
        with pytest.raises(StoreAwayError, match="NOETL_S3_SECRET_KEY") as refused:
            await s3.put(BUCKET, "a", b"x")

    told = "".join(traceback.format_exception(refused.value)) + repr(wrong)
    assert "wrong-and-secret" not in told
    assert SECRET_KEY not in repr(settings(s3_server.url))


async def test_what_the_server_is_sent_is_checked_by_it(s3_server: S3Server) -> None:
    """The MD5 in the head counts: a body that is not the one is refused."""
    async with S3(settings(s3_server.url)) as s3:
        with pytest.raises(StoreAwayError, match="BadDigest"):
            await s3._put(BUCKET, "bad", b"body", size=4, md5="XUFAKrxLKna5cZ2REBfFkg==")


def test_a_location_is_a_bucket_and_a_prefix() -> None:
    assert location_of("s3://b") == Location("b", "")
    assert location_of("s3://b/c/d/") == Location("b", "c/d")
    assert str(location_of("s3://b/c/d/")) == "s3://b/c/d"
    assert location_of("s3://b").key("n") == "n"
    assert location_of("s3://b/c").key("n") == "c/n"
    for text in ("/data", "s3://", "s3:///x", "https://b/c"):
        with pytest.raises(ValueError, match="s3://BUCKET"):
            location_of(text)


def test_settings_show_where_and_not_with_what() -> None:
    assert repr(S3Settings(endpoint="http://m:9000", access_key="a", secret_key="s")) == (
        "S3Settings(S3 at http://m:9000)"
    )
    assert S3Settings(region="eu-west-1").named == "S3 in eu-west-1"
