"""What the broker, the worker and the projection would have written, put there by hand."""

import hashlib
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import httpx
import msgspec

from noetl_core.domain.ids import ExecutionId, StepName
from noetl_core.domain.state import ExecutionState, StepState
from noetl_core.store.postgres import Pool

HELLO = """\
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: hello, path: examples/hello}
workload: {name: world}
workflow:
  - step: greet
    tool: {kind: noop}
"""

START_OF_TIME = datetime(2026, 1, 1, tzinfo=UTC)

_event_ids = count(1000)


async def registered(client: httpx.AsyncClient, content: str = HELLO) -> dict[str, Any]:
    answer = await client.post("/api/catalog/register", json={"content": content})
    assert answer.is_success, answer.text
    body: dict[str, Any] = answer.json()
    return body


_EXECUTION = """
INSERT INTO noetl.execution (
    execution_id, catalog_id, path, version, shard_id, status, state, ctx, progress, waiting_on,
    last_event_type, last_node_name, last_projected_event_id, error, started_at, updated_at,
    ended_at
)
VALUES ($1, 7, $2, 1, 0, $3, $4, '{}', $5, 'a worker', 'step.enter', 'greet', 99, $6, $7, $7, NULL)
"""


async def an_execution(
    pool: Pool,
    execution_id: int,
    *,
    status: str = "RUNNING",
    path: str = "examples/hello",
    steps: dict[str, StepState] | None = None,
    progress: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
    seconds: int = 0,
) -> None:
    state = ExecutionState(
        execution_id=ExecutionId(execution_id),
        steps={StepName(name): step for name, step in (steps or {}).items()},
    )
    await pool.execute(
        _EXECUTION,
        execution_id,
        path,
        status,
        msgspec.json.encode(state).decode(),
        msgspec.json.encode(progress or {}).decode(),
        None if error is None else msgspec.json.encode(error).decode(),
        START_OF_TIME + timedelta(seconds=seconds),
    )


async def ends(pool: Pool, execution_id: int, status: str = "COMPLETED") -> None:
    await pool.execute(
        "UPDATE noetl.execution SET status = $2 WHERE execution_id = $1", execution_id, status
    )


_EVENT = """
INSERT INTO noetl.event (
    execution_id, event_id, event_key, shard_id, event_type, catalog_id, loop_id, iter_index, result
)
VALUES ($1, $2, $3, 0, $4, $5, $6, $7, $8)
"""


async def an_event(
    pool: Pool,
    execution_id: int,
    *,
    event_type: str = "step.enter",
    event_key: str | None = None,
    catalog_id: int | None = None,
    loop_id: int | None = None,
    iter_index: int | None = None,
    result: dict[str, Any] | None = None,
) -> int:
    event_id = next(_event_ids)
    await pool.execute(
        _EVENT,
        execution_id,
        event_id,
        event_key or f"key {event_id}",
        event_type,
        catalog_id,
        loop_id,
        iter_index,
        None if result is None else msgspec.json.encode(result).decode(),
    )
    return event_id


_RESULT = """
INSERT INTO noetl.result_ref (
    execution_id, ref_id, step, store_tier, physical_uri, media_type, bytes, sha256, inline
)
VALUES ($1, $2, 'step', $3, $4, $5, $6, $7, $8)
"""


async def a_result(
    pool: Pool,
    execution_id: int,
    ref_id: int,
    body: bytes,
    *,
    media_type: str = "application/json",
    uri: str | None = None,
) -> None:
    await pool.execute(
        _RESULT,
        execution_id,
        ref_id,
        "db" if uri is None else "pvc",
        uri,
        media_type,
        len(body),
        hashlib.sha256(body).digest(),
        body if uri is None else None,
    )
