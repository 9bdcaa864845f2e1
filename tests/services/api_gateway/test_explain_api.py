"""What an execution waits for at this moment, and why it stands where it stands."""

from typing import Any

import msgspec
import pytest

from noetl_core.domain.ids import CommandId, ExecutionId, StepName
from noetl_core.domain.progress import waiting_on as projected
from noetl_core.domain.state import ExecutionState, ExecutionStatus, OpenCommand, Parked
from noetl_core.store import runtime
from noetl_core.store.postgres import Pool
from noetl_core.store.runtime import Registration
from services.api_gateway.conftest import Client
from services.api_gateway.given import an_event, an_execution


async def a_command(database: Pool, step: str = "load", **columns: Any) -> None:
    names = ["execution_id", "command_id", "shard_id", "step", "payload", *columns]
    values = [1, f"{step}.1#1", 0, step, b"", *columns.values()]
    places = ", ".join(f"${number}" for number in range(1, len(values) + 1))
    await database.execute(
        f"INSERT INTO noetl.command ({', '.join(names)}) VALUES ({places})", *values
    )


async def later(pool: Pool, column: str, seconds: float) -> None:
    await pool.execute(
        f"UPDATE noetl.command SET {column} = now() + make_interval(secs => $1)", seconds
    )


async def a_worker(pool: Pool, pools: str) -> None:
    registration = Registration(name=f"worker-{pools}", kind="worker", labels={"pool": pools})
    async with pool.acquire() as conn, conn.transaction():
        await runtime.register(conn, registration, lambda node: 1000 + node)


async def waiting_on(client: Client) -> str:
    one = (await client.get("/api/executions/1")).json()["waiting_on"]
    listed = (await client.get("/api/executions")).json()["items"][0]["waiting_on"]
    explained = (await client.get("/api/executions/1/explain")).json()["waiting_on"]
    assert one == listed == explained
    return str(one)


async def sentences(client: Client) -> str:
    answer = await client.get("/api/executions/1/explain")
    assert answer.status_code == 200, answer.text
    return "\n".join(answer.json()["sentences"])


class TestWaitingOn:
    async def test_it_says_that_no_worker_of_the_pool_is_online(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        await a_command(pool, pool="gpu")
        await a_worker(pool, "cpu")

        assert await waiting_on(client) == (
            "1 command of step `load` waits for a worker of pool `gpu`, and none is online"
        )
        assert "start a worker with NOETL_WORKER_POOL=gpu" in await sentences(client)

    async def test_it_says_what_a_worker_must_have(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await a_command(pool, requires=["zone=eu"])
        await a_worker(pool, "cpu")

        assert "of pool `cpu` that has `zone=eu`, and none is online" in await waiting_on(client)

    async def test_it_waits_for_a_free_worker_where_there_is_one(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        await a_command(pool)
        await a_worker(pool, "gpu,cpu")

        assert await waiting_on(client) == (
            "1 command of step `load` waits for a free worker of pool `cpu`"
        )

    async def test_a_worker_of_another_system_is_told_from_one_of_ours(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        await a_command(pool, pool="java")
        body = {"name": "worker-java", "runtime": "java"}
        await client.post("/api/worker/pool/register", json=body)

        assert await waiting_on(client) == (
            "1 command of step `load` waits for a worker of pool `java`: "
            "workers of another system are registered for it, none of ours is online"
        )
        assert "start a worker with NOETL_WORKER_POOL=java" in await sentences(client)

    @pytest.mark.parametrize(("interval", "is_there"), [(60, True), (10, False)])
    async def test_a_worker_of_another_system_may_be_silent_for_three_of_its_heartbeats(
        self, client: Client, pool: Pool, interval: float, is_there: bool
    ) -> None:
        await an_execution(pool, 1)
        await a_command(pool, pool="java")
        body = {"name": "w", "runtime": "java", "heartbeat_interval_seconds": interval}
        await client.post("/api/worker/pool/register", json=body)
        await pool.execute("UPDATE noetl.runtime SET heartbeat = now() - interval '100 seconds'")

        assert ("workers of another system" in await waiting_on(client)) == is_there

    async def test_it_says_which_tool_no_worker_has(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await a_command(pool, requires=["tool:acme.mailer", "zone=eu"])
        await a_worker(pool, "cpu")

        assert "that has the tool `acme.mailer`, `zone=eu`, and none" in await waiting_on(client)
        assert (
            "start a worker with NOETL_WORKER_POOL=cpu and NOETL_WORKER_LABELS=zone=eu, "
            "where the package with the tool `acme.mailer` is installed." in await sentences(client)
        )

    async def test_it_says_for_which_worker_a_command_is_meant(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        await a_command(pool, target_worker="worker-gpu")
        await later(pool, "target_until", 3600)
        await a_worker(pool, "cpu")

        sentence = await waiting_on(client)
        assert sentence.startswith(
            "1 command of step `load` is meant for worker `worker-gpu` (it is not online) until "
        )
        assert sentence.endswith("; then any of pool `cpu` may take it")
        await a_worker(pool, "gpu")
        assert "not online" not in await waiting_on(client)
        await later(pool, "target_until", -1)
        assert "waits for a free worker of pool `cpu`" in await waiting_on(client)

    async def test_an_approval_is_not_forgotten_because_something_runs(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        state = ExecutionState(
            execution_id=ExecutionId(1),
            status="RUNNING",
            commands={
                CommandId("load.1#1"): OpenCommand(step=StepName("load"), visit=1),
                CommandId("hold.1#1"): OpenCommand(
                    step=StepName("hold"), visit=1, parked=Parked(kind="approval", signal="hold")
                ),
            },
        )
        await pool.execute("UPDATE noetl.execution SET waiting_on = $1", projected(state))
        await a_command(pool, status="leased", worker_id="w1")
        await later(pool, "lease_until", 60)

        assert await waiting_on(client) == (
            "1 command of step `load` is running; besides, "
            "step `hold` waits for an approval; give it with `noetl approve 1 hold`"
        )

    @pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
    async def test_it_says_that_the_broker_it_waits_for_is_not_there(
        self, client: Client, pool: Pool, status: ExecutionStatus
    ) -> None:
        await an_execution(pool, 1, status=status)
        state = ExecutionState(execution_id=ExecutionId(1), status=status)
        await pool.execute("UPDATE noetl.execution SET waiting_on = $1", projected(state))

        assert (await waiting_on(client)).endswith(", and no broker owns its shard")
        await pool.execute("UPDATE noetl.execution_shard SET leased_until = now() + interval '1 h'")
        assert await waiting_on(client) == projected(state)

    async def test_it_says_when_the_next_attempt_is(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await a_command(pool, attempt=3)
        await later(pool, "available_at", 3600)
        when = await pool.fetchval("SELECT available_at FROM noetl.command")

        sentence = await waiting_on(client)

        assert sentence.startswith("1 command of step `load` will be tried again (attempt 3) at ")
        assert sentence.endswith(when.strftime("%Y-%m-%dT%H:%M:%SZ"))
        assert "goes on by itself" in await sentences(client)

    async def test_what_runs_comes_first(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await a_command(pool, "one", status="leased", worker_id="w1")
        await later(pool, "lease_until", 60)
        await a_command(pool, "two", pool="gpu")

        assert await waiting_on(client) == (
            "1 command of step `one` is running; "
            "1 command of step `two` waits for a worker of pool `gpu`, and none is online"
        )
        assert "Worker `w1` holds `one.1#1`" in await sentences(client)

    async def test_a_silent_worker_is_told_from_one_that_runs(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        await a_command(pool, status="leased", worker_id="w1")
        await later(pool, "lease_until", -1)

        assert "lost with a worker that fell silent" in await waiting_on(client)

    async def test_a_command_that_is_not_in_the_queue_any_more_is_lost(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        command = OpenCommand(step=StepName("load"), visit=1)
        state = ExecutionState(
            execution_id=ExecutionId(1), status="RUNNING", commands={CommandId("load.1#1"): command}
        )
        await pool.execute(
            "UPDATE noetl.execution SET state = $1, waiting_on = $2",
            msgspec.json.encode(state).decode(),
            projected(state),
        )

        assert "1 command of step `load` was lost from the queue; " in await waiting_on(client)

        event = await an_event(pool, 1, event_type="call.done")
        assert await waiting_on(client) == projected(state), "its end is not projected yet"
        await pool.execute("UPDATE noetl.execution SET last_projected_event_id = $1", event)
        await a_command(pool, status="leased", worker_id="w1")
        await later(pool, "lease_until", 60)
        assert await waiting_on(client) == "1 command of step `load` is running"

    async def test_what_the_state_says_stands_where_no_command_is_open(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)

        assert await waiting_on(client) == "a worker"

    async def test_a_flag_stands_until_the_next_event(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await pool.execute(
            "INSERT INTO noetl.dead_letter (execution_id, source, body, reason)"
            " VALUES (1, 'reaper', '', 'no token moves')"
        )

        assert await waiting_on(client) == "nothing can move it: no token moves"
        assert "noetl cancel 1" in await sentences(client)

        await pool.execute("UPDATE noetl.execution SET updated_at = now() + interval '1 s'")
        assert await waiting_on(client) == "a worker"


class TestExplain:
    async def test_it_names_the_child_the_timer_and_the_last_error(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        command = OpenCommand(
            step=StepName("call"),
            visit=1,
            parked=Parked(kind="playbook", child=ExecutionId(42)),
        )
        state = ExecutionState(
            execution_id=ExecutionId(1), commands={CommandId("call.1#1"): command}
        )
        await pool.execute(
            "UPDATE noetl.execution SET state = $1", msgspec.json.encode(state).decode()
        )
        await pool.execute(
            "INSERT INTO noetl.timer VALUES (1, 'wait:call.1#1', '2030-01-01T00:00:00Z')"
        )
        event = await an_event(pool, 1, event_type="call.error")
        await pool.execute(
            "UPDATE noetl.event SET error = $2, attempt = 2, node_name = 'load'"
            " WHERE event_id = $1",
            event,
            '{"kind": "http", "message": "503"}',
        )

        text = await sentences(client)

        assert "`noetl explain 42`" in text
        assert "runs out at 2030-01-01T00:00:00Z" in text
        assert "The last error: http: 503 in step `load`, attempt 2" in text

    async def test_what_happened_last_is_no_checkpoint(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await an_event(pool, 1, event_type="command.parked")
        await an_event(pool, 1, event_type="checkpoint.committed")

        text = await sentences(client)

        assert "The last thing that happened was `command.parked`, " in text

    async def test_it_says_that_nobody_owns_the_shard(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await pool.execute(
            "INSERT INTO noetl.inbox (shard_id, execution_id, body) VALUES (0, 1, '')"
        )

        text = await sentences(client)

        assert "No broker owns its shard" in text
        assert "1 message for it wait" in text

    async def test_it_says_how_old_the_status_may_be(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await an_event(pool, 1)
        await pool.execute(
            "UPDATE noetl.event SET shard_id = noetl.vnode(1) % 16,"
            " created_at = now() - interval '2 hours'"
        )
        await pool.execute("UPDATE noetl.execution_shard SET leased_until = now() + interval '1 h'")
        await pool.execute(
            "UPDATE noetl.execution_shard SET owner_instance = role, owner_runtime_id = 7"
        )

        text = await sentences(client)

        assert "lags behind the log: what is said here may be of 2 h" in text
        assert "No projection" not in text

    async def test_an_idle_shard_is_not_behind_and_one_without_a_projection_stands_still(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        await pool.execute(
            "INSERT INTO noetl.projection_checkpoint (shard_id, last_projected_event_id, lag_ms)"
            " VALUES (noetl.vnode(1) % 16, 5, 60000)"
        )

        text = await sentences(client)

        assert "lags behind" not in text
        assert "No projection owns its shard" in text

    async def test_of_one_that_has_ended_it_says_how(self, client: Client, pool: Pool) -> None:
        error = {"kind": "http", "message": "no"}
        await an_execution(pool, 1, status="FAILED", error=error)

        text = await sentences(client)

        assert "ended as FAILED" in text
        assert "The reason: http: no" in text
        assert "`noetl retry 1`" in text

    async def test_of_one_that_is_accepted_and_not_begun_it_says_so(
        self, client: Client, pool: Pool
    ) -> None:
        await pool.execute(
            "INSERT INTO noetl.inbox (shard_id, execution_id, body) VALUES (0, 1, '')"
        )

        assert "waiting for the broker to start it" in await sentences(client)

    @pytest.mark.parametrize("state", ["[]", '{"commands": []}', '{"commands": {"load.1#1": 7}}'])
    async def test_a_row_that_is_broken_is_said_to_be(
        self, client: Client, pool: Pool, state: str
    ) -> None:
        await an_execution(pool, 1)
        await pool.execute("UPDATE noetl.execution SET state = $1", state)

        assert "`noetl db rebuild-projection --execution 1`." in await sentences(client)

        for path in ("steps", "steps/load/result", "trace/load"):
            answer = await client.get(f"/api/executions/1/{path}")
            assert answer.status_code == 503, path
            assert "rebuild-projection --execution 1" in answer.json()["detail"]
        told = await client.post("/api/executions/1/signal", json={"name": "go"})
        assert told.status_code == 202

    async def test_of_nothing_there_is_nothing_to_say(self, client: Client) -> None:
        assert (await client.get("/api/executions/7/explain")).status_code == 404
