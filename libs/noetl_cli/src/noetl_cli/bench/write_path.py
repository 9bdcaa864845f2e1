"""The bare write path: what Postgres and NATS allow this design, with no engine around it.

Per task three event rows, one command (inserted, leased, deleted) and one inline result, in tables
made like the real ones in a scratch schema; a fenced group commit per batch; one JetStream message
per flush of the worker. Nothing is decided, rendered or projected. Two processes, as in the real
system: a writer and a worker.

    writer  --commit--> Postgres <--lease-- worker
       ^--------- JetStream <--flush-----------'
"""

import asyncio
import sys
from asyncio.subprocess import PIPE

import msgspec

from noetl_cli.failure import CommandFailed

SCHEMA = "noetl_write_path"
STREAM = "NOETL_WRITE_PATH"
BATCH_SUBJECT = "noetl_write_path.events"
WAKE_SUBJECT = "noetl_write_path.wake"
WINDOW = 500
"""Open tasks at once, as in the fan-out that is compared."""

_SECONDS_MAX = 600.0


class WritePath(msgspec.Struct, frozen=True, kw_only=True):
    n: int
    window: int
    batches: int
    seconds: float
    tasks_per_second: float


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What the worker tells of a task: it was claimed, or it is done (then with its result)."""

    command_id: str
    index: int
    result: bytes | None = None


async def measure_write_path(dsn: str, nats_url: str, n: int) -> WritePath:
    writer = await _spawn("noetl_cli.bench.write_path_writer", dsn, nats_url, str(n))
    worker = await _spawn("noetl_cli.bench.write_path_worker", dsn, nats_url)
    try:
        async with asyncio.timeout(_SECONDS_MAX):
            output, errors = await writer.communicate()
    finally:
        for process in (writer, worker):
            if process.returncode is None:
                process.kill()
                await process.wait()
    if writer.returncode != 0:
        raise CommandFailed(f"the bare write path could not be measured:\n{errors.decode()}")
    return msgspec.json.decode(output, type=WritePath)


async def _spawn(module: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", module, *arguments, stdout=PIPE, stderr=PIPE
    )
