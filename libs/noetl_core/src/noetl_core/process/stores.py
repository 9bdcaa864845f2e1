"""Opens what keeps results and archives, as the settings say."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from noetl_core.blob.file_place import FilePlace
from noetl_core.blob.place import Place
from noetl_core.blob.result_store import CACHE_BYTES_DEFAULT, ResultStore, tiers_of
from noetl_core.blob.s3 import REGION_DEFAULT, S3, SCHEME, S3Settings, location_of
from noetl_core.blob.s3_place import S3Place
from noetl_core.blob.s3_tier import S3Tier
from noetl_core.blob.tier import S3_TIERS, Tier
from noetl_core.process.config import StoreConfig

_MB = 1024 * 1024


@asynccontextmanager
async def open_results(
    config: StoreConfig, *, cache_bytes: int = CACHE_BYTES_DEFAULT
) -> AsyncIterator[ResultStore]:
    async with S3(s3_settings(config)) as s3, _archives(config, s3) as archives:
        yield ResultStore(
            store_dir=config.store_dir,
            objects=_objects(config, s3),
            default_tier=config.default_store_tier,
            archives=archives,
            cache_bytes=cache_bytes,
        )


@asynccontextmanager
async def open_tiers(config: StoreConfig) -> AsyncIterator[dict[str, Tier]]:
    """The tiers of results, by their names."""
    async with S3(s3_settings(config)) as s3:
        yield tiers_of(config.store_dir, _objects(config, s3))


def _objects(config: StoreConfig, s3: S3) -> Tier | None:
    if not config.s3_bucket:
        return None
    wanted = config.default_store_tier
    return S3Tier(s3, config.s3_bucket, name=wanted if wanted in S3_TIERS else "s3")


@asynccontextmanager
async def open_archives(config: StoreConfig) -> AsyncIterator[Place | None]:
    """None where no place is set."""
    async with S3(s3_settings(config)) as s3, _archives(config, s3) as archives:
        yield archives


@asynccontextmanager
async def _archives(config: StoreConfig, s3: S3) -> AsyncIterator[Place | None]:
    if not config.archives.startswith(SCHEME):
        yield FilePlace(config.archives) if config.archives else None
        return
    place = S3Place(
        s3, location_of(config.archives), copies_bytes=round(config.archive_copies_mb * _MB)
    )
    try:
        yield place
    finally:
        place.close()


def s3_settings(config: StoreConfig) -> S3Settings:
    return S3Settings(
        endpoint=config.s3_endpoint,
        access_key=config.s3_access_key,
        secret_key=config.s3_secret_key,
        region=config.s3_region or REGION_DEFAULT,
        timeout_seconds=config.s3_timeout_seconds,
    )
