"""The tiers `s3`, `minio` and `gcs`: payloads as objects of a bucket, `s3://BUCKET/results/...`.

A put is one request, so an object is there as a whole or not at all.
"""

from noetl_core.blob.s3 import S3, SCHEME
from noetl_core.blob.tier import path_of
from noetl_core.domain.ids import ExecutionId

_FOLDER = "results/"


class S3Tier:
    def __init__(self, s3: S3, bucket: str, *, name: str = "s3") -> None:
        self._s3 = s3
        self._bucket = bucket
        self.name = name

    async def put(self, execution_id: ExecutionId, name: str, body: bytes) -> str:
        key = _FOLDER + path_of(execution_id, name)
        await self._s3.put(self._bucket, key, body)
        return f"{SCHEME}{self._bucket}/{key}"

    async def get(self, uri: str) -> bytes:
        body = bytearray()
        await self._s3.read(self._bucket, self._key(uri), body.extend)
        return bytes(body)

    async def delete(self, uri: str) -> None:
        await self._s3.delete(self._bucket, self._key(uri))

    def _key(self, uri: str) -> str:
        """Only of our results: a worker says where its result is, and might name anything."""
        root = f"{SCHEME}{self._bucket}/"
        if not uri.startswith(root + _FOLDER):
            raise FileNotFoundError(uri)
        return uri.removeprefix(root)
