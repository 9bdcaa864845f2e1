"""A way to Postgres that can turn into a black hole: nothing is refused, nothing is answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from noetl_core.bus.cancel import cancel


class Way:
    """What is open when `swallow` is called is dead from then on; what comes after is fine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._generation = 0
        self._swallowed = -1
        self._pumps: set[asyncio.Task[None]] = set()
        self._ends: list[asyncio.StreamWriter] = []
        self.connections = 0

    def swallow(self) -> None:
        self._swallowed = self._generation
        self._generation += 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends += [writer, back]
        for source, target in ((reader, back), (there, writer)):
            pump = asyncio.create_task(self._pump(source, target, self._generation))
            self._pumps.add(pump)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, generation: int
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if generation > self._swallowed:
                    target.write(data)
                    await target.drain()
        if generation > self._swallowed:
            target.close()

    async def close(self) -> None:
        """Everybody notices now."""
        for end in self._ends:
            end.close()
        await cancel(self._pumps)


@asynccontextmanager
async def way_to(dsn: str) -> AsyncIterator[tuple[str, Way]]:
    """The DSN that goes by the way, and the way."""
    port = urlsplit(dsn).port
    assert port is not None, dsn
    way = Way(port)
    server = await asyncio.start_server(way.serve, "127.0.0.1", 0)
    own = server.sockets[0].getsockname()[1]
    try:
        yield dsn.replace(f":{port}/", f":{own}/"), way
    finally:
        server.close()
        await way.close()
