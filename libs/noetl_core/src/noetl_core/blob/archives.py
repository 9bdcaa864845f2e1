"""How archives lie in their place.

NAME/event-0000.parquet, NAME/result_ref-0000.parquet, ...
NAME/manifest.json     what they hold, for whoever has them and no database
making/NAME            a mark: as long as it is there, NAME is not finished
"""

import asyncio

import msgspec

from noetl_core.blob.place import Place
from noetl_core.store.archive import Archive

MAKING = "making/"

_MANIFEST = "/manifest.json"
_READ_AT_ONCE = 16

_decode = msgspec.json.Decoder(Archive).decode


def mark_of(name: str) -> str:
    return f"{MAKING}{name}"


async def write_manifest(place: Place, archive: Archive) -> None:
    body = msgspec.json.format(msgspec.json.encode(archive))
    await place.write(archive.name + _MANIFEST, body)


async def finished(place: Place) -> list[Archive]:
    """Every archive that is whole, the oldest first."""
    names = set(await place.names())
    found = [name for name in sorted(names) if name.endswith(_MANIFEST)]
    whole = [name for name in found if mark_of(name.removesuffix(_MANIFEST)) not in names]
    limit = asyncio.Semaphore(_READ_AT_ONCE)

    async def read(name: str) -> Archive:
        async with limit:
            return _decode(await place.read(name))

    return list(await asyncio.gather(*(read(name) for name in whole)))
