"""How long the status of one execution takes to read, with many of them in the table."""

import asyncio
import http.client
import random
import time
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import msgspec

from noetl_cli.bench.log_figures import percentiles
from noetl_cli.bench.measure import running_system
from noetl_cli.bench.usage import Usage, cpu_seconds, usage
from noetl_cli.bench.workloads import latency
from noetl_cli.client import open_gateway

EXECUTIONS = 100_000
READS_DEFAULT = 5_000

# Rows like the one of a real execution, with ids of their own.
_FILL = """
INSERT INTO noetl.execution
SELECT (jsonb_populate_record(x, jsonb_build_object('execution_id', x.execution_id - number))).*
FROM noetl.execution AS x, generate_series(1, $1) AS number
WHERE x.execution_id = (SELECT min(execution_id) FROM noetl.execution)
"""


class StatusFigures(msgspec.Struct, frozen=True, kw_only=True):
    bench: str
    n: int
    executions: int
    reads_per_second: float
    p50_ms: float
    p99_ms: float
    services: dict[str, Usage]


async def measure_status(*, n: int | None, data_dir: Path | None) -> StatusFigures:
    count = n or READS_DEFAULT
    async with running_system(data_dir) as system:
        async with open_gateway(system.url) as gateway:
            await latency(gateway, 1)
        ids = await _fill(system.dsn)
        chosen = random.Random(1).choices(ids, k=count)  # noqa: S311 - which rows, not secrets
        spent = cpu_seconds(before := system.parts())
        seconds = await asyncio.to_thread(_read_all, system.url, chosen)
        times = percentiles([one * 1000 for one in seconds])
        return StatusFigures(
            bench="status",
            n=count,
            executions=len(ids),
            reads_per_second=round(count / sum(seconds), 1),
            p50_ms=times.p50_ms,
            p99_ms=times.p99_ms,
            services=usage(before, spent),
        )


async def _fill(dsn: str) -> list[int]:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(_FILL, EXECUTIONS)
        await connection.execute("VACUUM (ANALYZE) noetl.execution")
        rows = await connection.fetch("SELECT execution_id FROM noetl.execution")
        return [row["execution_id"] for row in rows]
    finally:
        await connection.close()


def _read_all(url: str, execution_ids: list[int]) -> list[float]:
    """One client, one connection, one read after the other: what a single reader waits for."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    seconds = []
    for execution_id in execution_ids:
        begun = time.perf_counter()
        connection.request("GET", f"/api/executions/{execution_id}")
        answer = connection.getresponse()
        body = answer.read()
        seconds.append(time.perf_counter() - begun)
        assert answer.status == http.HTTPStatus.OK, body
    connection.close()
    return seconds
