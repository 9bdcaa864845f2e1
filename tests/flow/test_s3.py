"""Large results in S3, end to end; and executions go on while it is away."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from chaos.stack import Stack, running_stack
from support.flow import Flow
from support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Gate

from .conftest import PATIENT_LEASES

pytestmark = pytest.mark.slow

ITEMS = 40

LARGE = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: large, path: flow/large}
workflow:
  - step: make
    tool:
      kind: python
      code: |
        result = [{"n": n, "text": "x" * 5000} for n in range(%d)]
    next: {arcs: [{step: each}]}
  - step: each
    loop: {in: "{{ make }}", iterator: item}
    tool: {kind: noop, value: "{{ iter.item.n }}"}
    next: {arcs: [{step: add_up}]}
  - step: add_up
    tool:
      kind: duckdb
      tables: {made: "{{ make._ref }}"}
      query: "SELECT sum(n)::BIGINT AS total FROM made"
"""


@pytest.fixture
async def stack(tmp_path: Path, gate: Gate) -> AsyncIterator[Stack]:
    """Told of its S3 by the other names."""
    environment = {
        "NOETL_MINIO_ENDPOINT": gate.url,
        "NOETL_MINIO_ACCESS_KEY": ACCESS_KEY,
        "NOETL_MINIO_SECRET_KEY": SECRET_KEY,
        "NOETL_MINIO_BUCKET": BUCKET,
        "NOETL_DEFAULT_STORE_TIER": "minio",
        "NOETL_S3_TIMEOUT_SECONDS": "30",
    }
    with running_stack(tmp_path, **PATIENT_LEASES, **environment) as opened:
        yield opened
        await opened.client.aclose()


async def tiers(stack: Stack, execution_id: int) -> dict[str, Any]:
    rows = await stack.query(
        "SELECT store_tier, count(*) AS n FROM noetl.result_ref"
        " WHERE execution_id = $1 AND bytes > 65536 GROUP BY 1",
        execution_id,
    )
    return {row["store_tier"]: row["n"] for row in rows}


async def test_results_go_to_s3_and_elsewhere_while_it_is_away(stack: Stack, gate: Gate) -> None:
    flow = Flow(stack)
    path = await stack.register(LARGE % ITEMS)

    stored = await flow.ended(await stack.execute(path))
    result = await stack.client.get(f"/api/executions/{stored.execution_id}/steps/make/result")
    gate.spoil("shut")
    fallen_back = await flow.ended(await stack.execute(path))

    assert await tiers(stack, stored.execution_id) == {"minio": 1}
    assert await tiers(stack, fallen_back.execution_id) == {"pvc": 1}
    assert [item["n"] for item in result.json()] == list(range(ITEMS))
    for execution in (stored, fallen_back):
        assert execution.result("add_up")["rows"] == [{"total": sum(range(ITEMS))}]
        assert execution.result("each") == list(range(ITEMS))
    logs = "".join(log.read_text() for log in (Path(stack.data_dir) / "logs").glob("*.log"))
    assert "store.away" in logs
    assert SECRET_KEY not in logs
