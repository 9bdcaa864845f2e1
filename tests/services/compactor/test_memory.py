"""Archives are made and read with the memory that the chart gives a pod."""

import asyncio
import sys
from pathlib import Path

import pytest
import yaml

from noetl_core.store.postgres import Pool

from .old_log import KEPT_FROM_MS, a_week, an_execution

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "noetl" / "values.yaml"
RESULTS = 1500
RESULT_BYTES = 64 * 1024
READ_AT_ONCE = 500
READERS = 8
SHARE_MAX = 0.8
"""Of the limit: the rest is for what else a service does."""

# VmHWM is of this process alone; ru_maxrss would begin with what the test itself has taken.
ARCHIVES = """
import asyncio, sys
from pathlib import Path
import noetl_compactor.main
from noetl_compactor.archive import Rules, archive_past
from noetl_core.blob.file_place import FilePlace
from noetl_core.domain.snowflake import Snowflake
from noetl_core.process.clock import unix_ms
from noetl_core.store.postgres import open_pool

async def main():
    rules = Rules(FilePlace(Path(sys.argv[2])), Snowflake(node=7, now_ms=unix_ms).mint, KEPT_FROM)
    async with open_pool(sys.argv[1], role="noetl_compactor", size_max=2) as pool:
        archived = await archive_past(pool, rules)
        assert archived == 4, archived

asyncio.run(main())
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""
READS = """
import asyncio, sys
from pathlib import Path
import noetl_api_gateway.main
from noetl_core.blob.file_place import FilePlace
from noetl_core.blob.history import History
from noetl_core.store.postgres import open_pool

async def main():
    history, refs = History(FilePlace(Path(sys.argv[2]))), range(1, 1 + AT_ONCE)
    async with open_pool(sys.argv[1], role="noetl_api_gateway", size_max=2) as pool:
        async def reader():
            assert len(await history.find(pool, EXECUTION, refs)) == AT_ONCE

        await asyncio.gather(*(reader() for _ in range(READERS)))

asyncio.run(main())
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""
_RESULTS = """
INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, sha256, inline)
SELECT $1, n, 'load', 'db', octet_length(body), sha256(body), body
FROM generate_series(1, $2::integer) AS n CROSS JOIN LATERAL (
    SELECT string_agg(sha512((n * 10000 + m)::text::bytea), '') AS body
    FROM generate_series(1, $3::integer / 64) AS m
) AS made
"""


@pytest.mark.slow
async def test_results_of_the_largest_inline_size_are_archived_and_read_in_a_pod(
    pool: Pool, database: str, tmp_path: Path
) -> None:
    await a_week(pool)
    execution = await an_execution(pool, 1)
    await pool.execute(_RESULTS, execution, RESULTS, RESULT_BYTES, timeout=120)
    reads = READS.replace("AT_ONCE", str(READ_AT_ONCE)).replace("EXECUTION", str(execution))
    reads = reads.replace("READERS", str(READERS))

    archives = ARCHIVES.replace("KEPT_FROM", str(KEPT_FROM_MS))
    written = await peak_mib(archives, database, tmp_path / "archive")
    read = await peak_mib(reads, database, tmp_path / "archive")

    limit = yaml.safe_load(CHART.read_text())["resources"]["limits"]["memory"]
    assert max(written, read) < SHARE_MAX * int(limit.removesuffix("Mi")), (written, read)


async def peak_mib(script: str, database: str, directory: Path) -> float:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, database, str(directory)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return int(output.split()[-1]) / 1024
