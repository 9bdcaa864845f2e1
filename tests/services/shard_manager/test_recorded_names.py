"""What is written into noetl.metric without being asked is what docs/operations.md says of it."""

import re
from pathlib import Path

import msgspec

from noetl_core.store.postgres import Pool
from noetl_shard_manager.sweep import measure

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"

SAID = dict.fromkeys(
    (
        *("slots", "running", "free", "done", "failed", "unconfirmed"),
        *("heartbeat_success_rate", "heartbeat_latency_ms"),
        *("process_cpu_percent", "process_memory_peak_bytes"),
    ),
    1,
)


def names_told() -> list[str]:
    """Those of the table, whose rows begin with them."""
    table = OPERATIONS.read_text().split("| recorded by itself |")[1].split("\n\n")[0]
    return [
        name
        for row in table.splitlines()
        for name in re.findall(r"`(noetl_\w+)`", row.split(" | ")[0])
    ]


async def test_every_number_that_is_recorded_by_itself_is_told(pool: Pool) -> None:
    await pool.execute(
        "INSERT INTO noetl.runtime (runtime_id, name, kind, node, runtime)"
        " VALUES (1, 'w', 'worker', 1, $1)",
        msgspec.json.encode(SAID).decode(),
    )

    await measure(pool, name="m", keep_seconds=60, sweep_ms=1.0)

    rows = await pool.fetch("SELECT DISTINCT name FROM noetl.metric")
    assert sorted(names_told()) == sorted(row[0] for row in rows)
