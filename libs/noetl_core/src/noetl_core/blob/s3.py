"""Objects in buckets over the S3 API: of AWS, MinIO, SeaweedFS, or GCS with interoperability keys.

    put     one request for a whole object, never in parts: it is there or it is not, and a crash
            leaves nothing behind. The server checks the body by its MD5.
    read    the bytes as they come, in pieces
    names, delete

An object that is not there is a FileNotFoundError. Whatever else goes wrong (no connection, no
answer in time, an error of the server, a key that is refused) is a StoreAwayError: it says nothing
about the object. Its message has the code of the answer and no more of it, and never a key.

The library takes about 45 MB and a second of processor time: it is loaded at the first request.
"""

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

import msgspec

from noetl_core.blob.away import StoreAwayError, StoreRefusedError
from noetl_core.blob.metrics import S3_MS, S3_REQUESTS

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client

SCHEME = "s3://"
REGION_DEFAULT = "us-east-1"
"""A server that has no regions wants to be told one all the same."""
CHUNK_BYTES = 1024 * 1024
BYTES_PER_SECOND_MIN = 1_000_000
"""Whoever is slower than this for long is treated as away."""
ATTEMPTS_MAX = 3
CONNECTIONS_MAX = 32

_CONNECT_SECONDS_MAX = 5.0
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_NO_BUCKET = "NoSuchBucket"
_REFUSALS = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_MADE_BY_OTHERS = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})


_CHECK_KEYS = " (see NOETL_S3_ACCESS_KEY, NOETL_S3_SECRET_KEY and what they allow)"
_HINTS = {
    "AccessDenied": _CHECK_KEYS,
    "InvalidAccessKeyId": _CHECK_KEYS,
    "SignatureDoesNotMatch": _CHECK_KEYS,
    "NoCredentialsError": " (set NOETL_S3_ACCESS_KEY and NOETL_S3_SECRET_KEY)",
    "EndpointConnectionError": " (is NOETL_S3_ENDPOINT right, and does it run?)",
}


class S3Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach it. Without keys those count that the machine has for AWS."""

    endpoint: str = ""
    access_key: str = ""
    secret_key: str = ""
    region: str = REGION_DEFAULT
    timeout_seconds: float = 30.0

    def __repr__(self) -> str:
        return f"S3Settings({self.named})"

    @property
    def named(self) -> str:
        return f"S3 at {self.endpoint}" if self.endpoint else f"S3 in {self.region}"


class Location(NamedTuple):
    """`s3://bucket/prefix`; the prefix may be empty, and has no slash at its ends."""

    bucket: str
    prefix: str

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")


def location_of(text: str) -> Location:
    """Raises ValueError for what is none."""
    bucket, _, prefix = text.removeprefix(SCHEME).partition("/")
    if not text.startswith(SCHEME) or not bucket:
        raise ValueError(f"{text!r} is no place in S3: it is s3://BUCKET or s3://BUCKET/PREFIX")
    return Location(bucket, prefix.strip("/"))


class S3:
    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._resources = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._client: S3Client | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._resources.aclose()
        self._client = None

    async def put(self, bucket: str, key: str, body: bytes | Path) -> None:
        """Keep it under the key; a bucket that is not there yet is made."""
        size, md5 = await asyncio.to_thread(_measured, body)
        try:
            await self._put(bucket, key, body, size=size, md5=md5)
        except _NoBucketError:
            await self._make(bucket)
            await self._put(bucket, key, body, size=size, md5=md5)

    async def read(self, bucket: str, key: str, take: Callable[[bytes], object]) -> None:
        """Hand every piece of the object to `take`, in a thread."""
        async with self._request("read", bucket, key) as (client, limit):
            answer = await client.get_object(Bucket=bucket, Key=key)
            limit.reschedule(_soon(self._settings.timeout_seconds, answer["ContentLength"]))
            body = answer["Body"]
            with closing(body):
                async for chunk in body.iter_chunks(CHUNK_BYTES):
                    await asyncio.to_thread(take, chunk)

    async def names(self, bucket: str, prefix: str) -> list[str]:
        """The keys that begin with the prefix, sorted. A bucket that is not there has none."""
        found: list[str] = []
        try:
            async with self._request("list", bucket, prefix) as (client, _):
                pages = client.get_paginator("list_objects_v2").paginate(
                    Bucket=bucket, Prefix=prefix
                )
                async for page in pages:
                    found += [one["Key"] for one in page.get("Contents", ())]
        except _NoBucketError:
            return []
        return sorted(found)

    async def delete(self, bucket: str, key: str) -> None:
        try:
            async with self._request("delete", bucket, key) as (client, _):
                await client.delete_object(Bucket=bucket, Key=key)
        except FileNotFoundError:
            return

    async def _put(self, bucket: str, key: str, body: bytes | Path, *, size: int, md5: str) -> None:
        async with self._request("put", bucket, key, size=size) as (client, _):
            with ExitStack() as files:
                content: bytes | BinaryIO = (
                    files.enter_context(body.open("rb")) if isinstance(body, Path) else body
                )
                await client.put_object(
                    Bucket=bucket, Key=key, Body=content, ContentLength=size, ContentMD5=md5
                )

    async def _make(self, bucket: str) -> None:
        async with self._request("make", bucket, "") as (client, _):
            if self._settings.endpoint or self._settings.region == REGION_DEFAULT:
                await client.create_bucket(Bucket=bucket)
            else:
                where: Any = {"LocationConstraint": self._settings.region}
                await client.create_bucket(Bucket=bucket, CreateBucketConfiguration=where)

    @asynccontextmanager
    async def _request(
        self, operation: str, bucket: str, key: str, *, size: int = 0
    ) -> AsyncIterator[tuple["S3Client", asyncio.Timeout]]:
        """The client for one request, which ends in time; its errors become ours."""
        begun = time.perf_counter()
        outcome = "away"
        try:
            client = await self._opened()
            async with asyncio.timeout_at(_soon(self._settings.timeout_seconds, size)) as limit:
                yield client, limit
            outcome = "ok"
        except Exception as error:
            reason = _reason(error)
            if reason is None:
                raise
            if operation == "make" and reason in _MADE_BY_OTHERS:
                outcome = "ok"
                return
            if reason in _MISSING:
                outcome = "missing"
                raise FileNotFoundError(f"{SCHEME}{bucket}/{key}") from error
            what = f"{self._settings.named} could not {operation} {SCHEME}{bucket}/{key}: "
            raise _kind(error, reason)(what + reason + _HINTS.get(reason, "")) from error
        finally:
            S3_REQUESTS.add(1, {"operation": operation, "outcome": outcome})
            S3_MS.record((time.perf_counter() - begun) * 1000, {"operation": operation})

    async def _opened(self) -> "S3Client":
        async with self._opening:
            if self._client is None:
                self._client = await self._open()
            return self._client

    async def _open(self) -> "S3Client":
        session, config = await asyncio.to_thread(_session, self._settings)
        opening = session.client("s3", endpoint_url=self._settings.endpoint or None, config=config)
        client: S3Client = await self._resources.enter_async_context(opening)
        return client


class _NoBucketError(StoreRefusedError):
    """There is no such bucket, or not yet."""


def _session(settings: S3Settings) -> tuple[Any, Any]:
    import aioboto3  # noqa: PLC0415 - only whoever speaks to S3 pays for it
    from aiobotocore.config import AioConfig  # noqa: PLC0415

    session = aioboto3.Session(
        aws_access_key_id=settings.access_key or None,
        aws_secret_access_key=settings.secret_key or None,
        region_name=settings.region,
    )
    config = AioConfig(
        connect_timeout=min(_CONNECT_SECONDS_MAX, settings.timeout_seconds),
        read_timeout=settings.timeout_seconds,
        max_pool_connections=CONNECTIONS_MAX,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS_MAX},
        # The body is checked by the MD5 in the signed head: hashing it once more, here, would
        # stand still everything else; and trailing checksums are not understood by all servers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": "path" if settings.endpoint else "auto",
            "payload_signing_enabled": False,
        },
    )
    return session, config


def _soon(seconds: float, size: int) -> float:
    """When so many bytes are here, or on their way for too long."""
    return asyncio.get_running_loop().time() + seconds + size / BYTES_PER_SECOND_MIN


def _measured(body: bytes | Path) -> tuple[int, str]:
    """How long it is, and its MD5 as the head of a request has it."""
    found = hashlib.md5(usedforsecurity=False)
    if isinstance(body, bytes):
        found.update(body)
        return len(body), base64.b64encode(found.digest()).decode()
    size = 0
    with body.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
            size += len(chunk)
    return size, base64.b64encode(found.digest()).decode()


def _reason(error: Exception) -> str | None:
    """What went wrong, in a word or two; None for what is no error of a request."""
    import aiohttp  # noqa: PLC0415 - loaded by now, or nothing was asked of it
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    if isinstance(error, ClientError):
        head = error.response.get("ResponseMetadata", {})
        return str(error.response.get("Error", {}).get("Code") or head.get("HTTPStatusCode"))
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, BotoCoreError | aiohttp.ClientError):
        return type(error).__name__
    return None


def _kind(error: Exception, reason: str) -> type[StoreAwayError]:
    if reason == _NO_BUCKET:
        return _NoBucketError
    # Errors without an answer have the attribute too, and nothing in it.
    answer = getattr(error, "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    is_refused = reason == "NoCredentialsError" or status in _REFUSALS
    return StoreRefusedError if is_refused else StoreAwayError
