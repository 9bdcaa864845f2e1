"""Work that is pulled, paged, streamed and handed to children, with every service at work."""

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import httpx
import pytest

from flow.test_control import begin, client, results, until
from noetl_core.store.postgres import Pool

__all__ = ["client"]

CURSOR = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: pull}
workload: {dsn: ""}
workflow:
  - step: pull
    loop:
      cursor:
        auth: "{{ workload.dsn }}"
        claim: >-
          UPDATE work SET claimed_by = '{{ idempotency_key }}'
          WHERE id IN (SELECT id FROM work WHERE claimed_by IS NULL
                       ORDER BY id LIMIT {{ __frame_max_rows }} FOR UPDATE SKIP LOCKED)
          RETURNING id
      iterator: row
      spec: {mode: cursor, max_in_flight: 3, frame: {max_rows: 4, row_concurrency: 2}}
    tool: {kind: noop, value: "{{ row.id * 10 }}"}
    sink: {tool: postgres, auth: "{{ workload.dsn }}", table: done, args: {n: "{{ output.data }}"}}
    next: {arcs: [{step: sum}]}
  - step: sum
    tool: {kind: noop, value: "{{ pull.results | sum(start=[]) | sum }}"}
"""

STREAM = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: stream}
workload: {dsn: ""}
workflow:
  - step: read
    tool:
      kind: postgres
      auth: "{{ workload.dsn }}"
      chunk_size: 4
      command: SELECT id FROM work ORDER BY id
    next:
      arcs:
        - {step: take, on: call.partial}
        - {step: last}
  - step: take
    tool:
      kind: postgres
      auth: "{{ workload.dsn }}"
      command: INSERT INTO done SELECT unnest(%(ids)s::int[])
      params: {ids: "{{ read.rows | map(attribute='id') | list }}"}
  - step: last
    tool: {kind: noop, value: "{{ read.row_count | default(0) }}"}
"""

CHILD = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: child}
workflow:
  - step: answer
    tool: {kind: noop, value: "{{ workload.n + 1 }}"}
"""

CHILDREN = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: children}
workflow:
  - step: each
    loop: {in: [1, 2, 3], iterator: n}
    tool: {kind: playbook, path: child, input: {n: "{{ n }}"}, return_step: answer}
    next: {arcs: [{step: sum}]}
  - step: sum
    tool: {kind: noop, value: "{{ each.results | sum }}"}
"""


@pytest.fixture
async def target(empty_database: str) -> AsyncIterator[Pool]:
    async with asyncpg.create_pool(empty_database, min_size=0, max_size=2) as opened:
        await opened.execute("CREATE TABLE work (id int PRIMARY KEY, claimed_by text)")
        await opened.execute("CREATE TABLE done (n int)")
        await opened.execute("INSERT INTO work SELECT n FROM generate_series(1, 18) n")
        yield opened


async def result_of(client: httpx.AsyncClient, content: str, step: str, **payload: Any) -> Any:
    execution = await begin(client, content, **payload)
    view = await until(client, execution, status="ED")
    assert view["status"] == "COMPLETED", view
    return (await results(client, execution))[step]


async def test_a_cursor_loop_works_off_a_table_and_sinks_every_row_once(
    client: httpx.AsyncClient, target: Pool, empty_database: str
) -> None:
    assert await result_of(client, CURSOR, "sum", dsn=empty_database) == 1710

    written = [row["n"] for row in await target.fetch("SELECT n FROM done ORDER BY n")]
    assert written == [n * 10 for n in range(1, 19)]


async def test_every_chunk_of_a_streamed_result_has_a_token_of_its_own(
    client: httpx.AsyncClient, target: Pool, pool: Pool, empty_database: str
) -> None:
    await result_of(client, STREAM, "last", dsn=empty_database)

    written = [row["n"] for row in await target.fetch("SELECT n FROM done ORDER BY n")]
    chunks = await pool.fetchval(
        "SELECT count(*) FROM noetl.event WHERE event_type = 'call.partial'"
    )
    assert written == list(range(1, 19))
    assert chunks == 5


async def test_a_loop_of_children_gathers_what_they_return(client: httpx.AsyncClient) -> None:
    await client.post("/api/catalog/register", json={"content": CHILD})

    assert await result_of(client, CHILDREN, "sum") == 9
