"""The runtime control loop over HTTP: register, heartbeat, deregister, lists, metrics."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import pytest

from noetl_api_gateway.app import build_app
from noetl_api_gateway.endpoint import Gateway
from noetl_core.domain.ids import RuntimeId
from noetl_core.store import metric, runtime, topology
from noetl_core.store.metric import Sample
from noetl_core.store.postgres import Pool
from noetl_core.store.runtime import Registration
from services.api_gateway.conftest import Client

POOL = {
    "name": "worker-cpu",
    "runtime": "cpu",
    "uri": "local://here",
    "status": "ready",
    "capacity": 8,
    "labels": ["fast"],
    "pid": 7,
    "hostname": "here",
}


async def post(client: Client, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = await client.post(path, json=body)
    return answer.status_code, answer.json()


async def get(client: Client, path: str) -> Any:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def a_worker(pool: Pool, name: str, **report: Any) -> RuntimeId:
    """A worker of ours, as its own process registers it."""
    registration = Registration(
        name=name, kind="worker", capacity=4, labels={"pool": "gpu,cpu", "zone": "eu"}
    )
    async with pool.acquire() as conn, conn.transaction():
        runtime_id, _ = await runtime.register(conn, registration, lambda node: 1000 + node)
    await runtime.heartbeat(pool, runtime_id, name=name, report=report)
    return runtime_id


class TestRegistration:
    async def test_a_pool_is_registered_once_and_then_replaced(self, client: Client) -> None:
        first = await post(client, "/api/worker/pool/register", POOL)
        again = await post(client, "/api/worker/pool/register", {**POOL, "capacity": 9})

        assert first[0] == again[0] == 200
        assert first[1]["runtime_id"] == again[1]["runtime_id"]
        (item,) = (await get(client, "/api/runtimes"))["items"]
        assert (item["kind"], item["name"], item["capacity"]) == ("worker_pool", "worker-cpu", 9)
        assert item["runtime"] == {"type": "cpu", "pid": 7, "hostname": "here"}

    async def test_a_pool_must_say_which_commands_it_runs(self, client: Client) -> None:
        status, problem = await post(client, "/api/worker/pool/register", {"name": "w"})

        assert status == 422
        assert "runtime" in problem["detail"]

    async def test_a_server_is_registered_by_its_url(self, client: Client) -> None:
        body = {"name": "server-a", "component_type": "server_api", "base_url": "http://a:8083"}

        status, _ = await post(client, "/api/runtime/register", body)

        assert status == 200
        (item,) = (await get(client, "/api/runtimes?kind=server_api"))["items"]
        assert item["uri"] == "http://a:8083"

    async def test_a_process_of_ours_cannot_be_overwritten(
        self, client: Client, pool: Pool
    ) -> None:
        async with pool.acquire() as conn, conn.transaction():
            await runtime.register(
                conn, Registration(name="b1", kind="broker"), lambda node: 1000 + node
            )
        body = {"name": "b1", "component_type": "broker"}

        status, problem = await post(client, "/api/runtime/register", body)
        gone = await client.request("DELETE", "/api/runtime/deregister", json=body)

        assert (status, gone.status_code) == (409, 404)
        assert "choose another" in problem["detail"]
        assert await runtime.live_count(pool, "broker") == 1

    async def test_a_broker_of_another_system_is_not_counted_as_one_of_ours(
        self, client: Client, pool: Pool
    ) -> None:
        await post(client, "/api/runtime/register", {"name": "b", "component_type": "broker"})

        assert await runtime.live_count(pool, "broker") == 0


class TestHeartbeat:
    async def test_it_brings_back_who_was_offline_and_says_what_is_in_use(
        self, client: Client, pool: Pool
    ) -> None:
        await post(client, "/api/worker/pool/register", POOL)
        await pool.execute("UPDATE noetl.runtime SET heartbeat = now() - interval '1 hour'")
        await topology.mark_stale(pool, silent_seconds=45)
        assert (await get(client, "/api/workers"))["items"][0]["status"] == "offline"

        status, body = await post(
            client, "/api/worker/pool/heartbeat", {"name": "worker-cpu", "running": 3}
        )

        assert (status, body["recreated"]) == (200, False)
        (worker,) = (await get(client, "/api/workers"))["items"]
        assert (worker["status"], worker["slots"]) == ("ready", 8)
        assert (worker["running"], worker["free"]) == (3, 5)
        assert worker["hostname"] == "here"
        assert worker["heartbeat_age_seconds"] < 5

    async def test_one_that_is_unknown_is_registered_if_it_says_enough(
        self, client: Client
    ) -> None:
        status, body = await post(client, "/api/worker/pool/heartbeat", POOL)

        assert (status, body["recreated"]) == (200, True)

    async def test_one_that_is_unknown_and_says_nothing_is_told_what_to_do(
        self, client: Client
    ) -> None:
        status, problem = await post(client, "/api/worker/pool/heartbeat", {"name": "w"})

        assert status == 404
        assert "POST /api/worker/pool/register" in problem["detail"]

    async def test_nobody_is_recreated_where_that_is_turned_off(self, gateway: Gateway) -> None:
        app = build_app(replace(gateway, auto_recreate_runtime=False))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            status, _ = await post(client, "/api/worker/pool/heartbeat", POOL)

        assert status == 404

    async def test_a_server_has_one_too(self, client: Client) -> None:
        body = {"name": "s", "component_type": "server_api"}
        await post(client, "/api/runtime/register", body)

        status, _ = await post(client, "/api/runtime/heartbeat", body)

        assert status == 200

    async def test_a_worker_may_say_it_in_other_words(self, client: Client) -> None:
        said = {"available_slots": 3, "active_tasks": 5, "tool_pools": {"postgres": 2}}
        await post(client, "/api/worker/pool/register", POOL)

        status, _ = await post(
            client, "/api/worker/pool/heartbeat", {"worker_id": "worker-cpu", **said}
        )

        assert status == 200
        (worker,) = (await get(client, "/api/workers"))["items"]
        assert (worker["free"], worker["running"], worker["tools"]) == (3, 5, {"postgres": 2})

    @pytest.mark.parametrize(
        ("first", "then", "shown"),
        [
            ({"running": 3, "free": 5}, {"running": 6}, (8, 6, 2)),
            ({"running": 3, "free": 5}, {"free": 7}, (8, 1, 7)),
            ({"running": 3, "free": 5}, {"capacity": 16}, (16, 3, 13)),
            ({"running": 3, "free": 5}, {}, (8, 3, 5)),
            ({"running": 3, "free": 5}, {"running": 10, "free": 6}, (16, 10, 6)),
            ({"running": 3, "free": 0}, {}, (8, 3, 0)),
        ],
    )
    async def test_what_it_leaves_out_follows_from_what_it_says_and_not_from_the_one_before(
        self,
        client: Client,
        first: dict[str, int],
        then: dict[str, int],
        shown: tuple[int, int, int],
    ) -> None:
        await post(client, "/api/worker/pool/register", POOL)
        for said in (first, then):
            await post(client, "/api/worker/pool/heartbeat", {"name": "worker-cpu", **said})

        (worker,) = (await get(client, "/api/workers"))["items"]

        assert (worker["slots"], worker["running"], worker["free"]) == shown

    @pytest.mark.parametrize(
        ("said", "shown"),
        [
            ({"running": 3, "free": 5}, (8, 3, 5)),
            ({"running": 3}, (None, 3, None)),
            ({}, (None, None, None)),
        ],
    )
    async def test_of_a_worker_without_a_capacity_it_is_the_capacity(
        self, client: Client, said: dict[str, int], shown: tuple[int | None, ...]
    ) -> None:
        await post(client, "/api/worker/pool/register", {**POOL, "capacity": None})
        await post(client, "/api/worker/pool/heartbeat", {"name": "worker-cpu", **said})

        (worker,) = (await get(client, "/api/workers"))["items"]

        assert (worker["slots"], worker["running"], worker["free"]) == shown

    @pytest.mark.parametrize(
        ("registered", "said", "capacity"),
        [
            (4, {"available_slots": 3, "active_tasks": 5}, 8),
            (None, {"available_slots": 3, "active_tasks": 5}, 8),
            (16, {"available_slots": 3, "active_tasks": 5}, 16),
            (4, {"available_slots": 3, "active_tasks": 5, "capacity": 6}, 6),
            (4, {"available_slots": 9}, 4),
        ],
    )
    async def test_what_it_has_at_the_moment_is_its_capacity_where_it_was_said_to_have_less(
        self, client: Client, registered: int | None, said: dict[str, int], capacity: int
    ) -> None:
        await post(client, "/api/worker/pool/register", {**POOL, "capacity": registered})

        await post(client, "/api/worker/pool/heartbeat", {"worker_id": "worker-cpu", **said})

        (item,) = (await get(client, "/api/runtimes"))["items"]
        assert item["capacity"] == capacity

    @pytest.mark.parametrize("said", ["running", "free", "available_slots", "active_tasks"])
    async def test_more_than_anybody_has_is_refused_and_harms_nobody(
        self, client: Client, pool: Pool, said: str
    ) -> None:
        status, problem = await post(client, "/api/worker/pool/heartbeat", {**POOL, said: 10**400})

        assert status == 422
        assert problem["field"] == said
        await metric.observe(pool)

    async def test_of_nobody_is_refused(self, client: Client) -> None:
        assert (await post(client, "/api/worker/pool/heartbeat", {"running": 1}))[0] == 422

    async def test_who_is_about_to_end_stays_so_unless_it_says_otherwise(
        self, client: Client
    ) -> None:
        await post(client, "/api/worker/pool/register", {**POOL, "status": "draining"})
        statuses = []
        for said in ({}, {"status": "ready"}, {}):
            body = {"name": "worker-cpu", **said}
            await post(client, "/api/worker/pool/heartbeat", body)
            statuses.append((await get(client, "/api/workers"))["items"][0]["status"])

        assert statuses == ["draining", "ready", "ready"]

    async def test_a_script_need_not_say_that_it_sends_json_and_a_page_must(
        self, client: Client
    ) -> None:
        await post(client, "/api/worker/pool/register", POOL)
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        path, body = "/api/worker/pool/heartbeat", b'{"name": "worker-cpu"}'

        assert (await client.post(path, content=body, headers=form)).status_code == 200
        assert (
            await client.post(path, content=b"name=worker-cpu", headers=form)
        ).status_code == 400
        for header in ({"Origin": "https://else.where"}, {"Sec-Fetch-Site": "cross-site"}):
            page = await client.post(path, content=body, headers={**form, **header})
            assert page.status_code == 415


class TestDeregistration:
    async def test_by_body_or_by_query_it_is_offline_and_not_gone(self, client: Client) -> None:
        for _ in range(2):
            await post(client, "/api/worker/pool/register", POOL)
        body = {"name": "worker-cpu"}

        by_body = await client.request("DELETE", "/api/worker/pool/deregister", json=body)
        by_query = await client.delete("/api/worker/pool/deregister?name=worker-cpu")

        assert (by_body.status_code, by_query.status_code) == (200, 200)
        (item,) = (await get(client, "/api/runtimes"))["items"]
        assert item["status"] == "offline"

    async def test_of_nobody_is_said_to_be_of_nobody(self, client: Client) -> None:
        answer = await client.delete("/api/runtime/deregister?name=x&component_type=server_api")

        assert answer.status_code == 404


class TestLists:
    async def test_a_worker_shows_its_live_capacity(self, client: Client, pool: Pool) -> None:
        tools = {"python": {"slots": 2, "free": 1}}
        await a_worker(pool, "worker-1", running=3, free=1, tools=tools)

        (worker,) = (await get(client, "/api/workers"))["items"]

        assert worker["pools"] == ["gpu", "cpu"]
        assert worker["labels"] == {"zone": "eu"}
        assert (worker["slots"], worker["running"], worker["free"]) == (4, 3, 1)
        assert worker["tools"] == tools

    async def test_a_pool_is_its_ready_workers_together(self, client: Client, pool: Pool) -> None:
        for name, running in (("worker-1", 3), ("worker-2", 1)):
            await a_worker(pool, name, running=running, free=4 - running)
        gone = await a_worker(pool, "worker-3", running=4, free=0)
        await runtime.mark_offline(pool, [gone])
        await pool.execute('UPDATE noetl.runtime SET labels = labels || \'{"pool_name": "ours"}\'')
        await post(client, "/api/worker/pool/register", POOL)

        pools = (await get(client, "/api/worker/pools"))["items"]

        assert [(p["runtime"], p["name"], p["workers"]) for p in pools] == [
            ("cpu", "ours", 2),
            ("cpu", "worker-cpu", 1),
            ("gpu", "ours", 2),
        ]
        assert (pools[0]["capacity"], pools[0]["running"], pools[0]["free"]) == (8, 4, 4)
        assert pools[0]["members"] == ["worker-1", "worker-2", "worker-3"]

    async def test_a_pool_shows_what_its_workers_have_in_common_and_the_tools_of_them_all(
        self, client: Client
    ) -> None:
        for name, labels, tools in (
            ("a", {"zone": "eu", "gpu": "x"}, {"python": {"slots": 4, "free": 1}, "postgres": 2}),
            ("b", {"zone": "eu", "gpu": "y"}, {"python": {"slots": 2, "free": 2}, "odd": "many"}),
        ):
            uri = f"local://{name}"
            said = {"name": name, "labels": {**labels, "pool_name": "ours"}, "tools": tools}
            await post(client, "/api/worker/pool/register", {**POOL, **said, "uri": uri})

        (pool,) = (await get(client, "/api/worker/pools"))["items"]

        assert pool["labels"] == {"zone": "eu"}
        assert pool["uri"] == "local://b"
        assert pool["tools"] == {
            "odd": {"slots": None, "free": None},
            "postgres": {"slots": None, "free": 2},
            "python": {"slots": 6, "free": 3},
        }

    async def test_a_pool_whose_last_worker_is_about_to_end_is_draining(
        self, client: Client
    ) -> None:
        said = {**POOL, "status": "draining", "running": 2, "free": 6}
        await post(client, "/api/worker/pool/register", said)

        (pool,) = (await get(client, "/api/worker/pools"))["items"]

        assert (pool["status"], pool["workers"], pool["draining"]) == ("draining", 0, 1)
        assert (pool["capacity"], pool["running"], pool["free"]) == (0, 2, 0)

    async def test_the_offline_stand_last_and_hide_nobody_who_lives(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("noetl_api_gateway.runtime.WORKERS_MAX", 2)
        for name, status in (("a", "offline"), ("b", "offline"), ("c", "ready"), ("d", "ready")):
            said = {**POOL, "name": name, "status": status}
            await post(client, "/api/worker/pool/register", said)

        workers = (await get(client, "/api/workers"))["items"]
        pools = (await get(client, "/api/worker/pools"))["items"]
        runtimes = (await get(client, "/api/runtimes"))["items"]

        assert [worker["name"] for worker in workers] == ["c", "d"]
        assert [(pool["name"], pool["capacity"]) for pool in pools] == [("c", 8), ("d", 8)]
        assert [runtime["name"] for runtime in runtimes] == ["c", "d", "a", "b"]

    async def test_what_only_the_broker_reads_is_not_shown(
        self, client: Client, pool: Pool
    ) -> None:
        await a_worker(pool, "worker-1")
        await pool.execute(
            'UPDATE noetl.runtime SET labels = labels || \'{"tool_slots": "python=2"}\''
        )

        (worker,) = (await get(client, "/api/workers"))["items"]
        (runtime_shown,) = (await get(client, "/api/runtimes"))["items"]

        assert worker["labels"] == {"zone": "eu"}
        assert runtime_shown["labels"] == {"pool": "gpu,cpu", "zone": "eu"}

    async def test_who_was_replaced_by_its_successor_is_not_shown(
        self, client: Client, pool: Pool
    ) -> None:
        for _ in range(2):
            await a_worker(pool, "worker-1")

        assert len((await get(client, "/api/workers"))["items"]) == 1

    async def test_a_pool_with_a_strange_label_harms_nobody(self, client: Client) -> None:
        for name, labels in (("a", {"pool_name": 5}), ("b", {"pool": ["x"]}), ("c", {})):
            await post(
                client, "/api/worker/pool/register", {**POOL, "name": name, "labels": labels}
            )

        pools = (await get(client, "/api/worker/pools"))["items"]

        assert [pool["name"] for pool in pools] == ["b", "5", "c"]

    async def test_a_pool_with_more_tools_than_can_be_counted_harms_nobody(
        self, client: Client
    ) -> None:
        for name in "ab":
            labels = {"pool_name": "ours"}
            said = {"name": name, "labels": labels, "tools": {"python": 10**4299 * 9, "http": 2}}
            # As text: a client of Python does not write so large a number.
            body = msgspec.json.encode({**POOL, **said})
            answer = await client.post("/api/worker/pool/register", content=body)
            assert answer.status_code == 200, answer.text

        (pool,) = (await get(client, "/api/worker/pools"))["items"]

        assert pool["tools"] == {
            "http": {"slots": None, "free": 4},
            "python": {"slots": None, "free": None},
        }

    async def test_servers_and_pools_are_found_by_the_names_others_have_for_them(
        self, client: Client, pool: Pool
    ) -> None:
        await a_worker(pool, "worker-1")
        await post(client, "/api/worker/pool/register", POOL)
        async with pool.acquire() as conn, conn.transaction():
            ours = Registration(name="server-here", kind="api-gateway")
            await runtime.register(conn, ours, lambda node: 2000 + node)

        async def names(kind: str) -> list[str]:
            found = await get(client, f"/api/runtimes?kind={kind}")
            return [item["name"] for item in found["items"]]

        assert await names("server_api") == ["server-here"]
        assert await names("worker_pool") == ["worker-1", "worker-cpu"]
        assert await names("worker") == ["worker-1"]


class TestMetrics:
    async def test_those_of_a_kind_are_found_by_the_name_others_have_for_it(
        self, client: Client, pool: Pool
    ) -> None:
        for number, (kind, component) in enumerate(
            (("worker", "w1"), ("worker_pool", "p1"), ("reaper", "r"), ("worker", "w2"))
        ):
            await metric.report(pool, [Sample("m", number)], kind=kind, component=component)

        async def values(query: str) -> list[float]:
            found = await get(client, f"/api/metrics/query?{query}")
            return [item["value"] for item in found["items"]]

        assert await values("kind=worker_pool") == [3, 1, 0]
        assert await values("kind=worker_pool&limit=2") == [3, 1]
        assert await values("kind=worker") == [3, 0]
        assert await values("kind=worker&component=w1") == [0]
        assert await values("name=m&kind=reaper") == [2]
        assert await values("") == [3, 2, 1, 0]

    async def test_one_of_a_time_to_come_is_of_now_and_will_be_forgotten(
        self, client: Client
    ) -> None:
        sample = {"name": "m", "value": 1, "reported_at": "2999-01-01T00:00:00Z"}

        await post(client, "/api/metrics/report", {"component": "c", "metrics": [sample]})

        (item,) = (await get(client, "/api/metrics/query?name=m"))["items"]
        assert datetime.fromisoformat(item["reported_at"]) <= datetime.now(UTC)

    async def test_what_is_reported_can_be_asked_for(self, client: Client) -> None:
        await post(client, "/api/worker/pool/register", POOL)
        metrics = [
            {"name": "queue", "value": 3, "labels": {"pool": "cpu"}},
            {"name": "busy", "value": 0.5, "reported_at": "2026-01-01T00:00:00Z"},
        ]
        body = {"component": "worker-cpu", "metrics": metrics}

        status, answer = await post(client, "/api/metrics/report", body)

        assert (status, answer) == (202, {"accepted": 2})
        (queue,) = (await get(client, "/api/metrics/query?name=queue"))["items"]
        assert queue["value"] == 3
        labels = {"pool": "cpu", "component": "worker-cpu", "kind": "worker_pool"}
        assert queue["labels"] == labels
        recent = await get(client, "/api/metrics/query?since=2026-01-02T00:00:00Z")
        assert [item["name"] for item in recent["items"]] == ["queue"]
        assert (await get(client, "/api/metrics/query?component=other"))["items"] == []

    async def test_nobody_reports_in_the_name_of_another(self, client: Client) -> None:
        sample = {"name": "m", "value": 1, "labels": {"component": "b", "kind": "broker", "x": "y"}}

        await post(client, "/api/metrics/report", {"component": "a", "metrics": [sample]})

        (item,) = (await get(client, "/api/metrics/query?name=m"))["items"]
        assert item["labels"] == {"component": "a", "kind": "worker_pool", "x": "y"}

    async def test_pages_follow_each_other(self, client: Client) -> None:
        metrics = [{"name": "m", "value": number} for number in range(5)]
        await post(client, "/api/metrics/report", {"component": "c", "metrics": metrics})
        seen: list[float] = []
        before: str | None = ""

        while before is not None:
            page = await get(client, f"/api/metrics/query?limit=2{before and '&before=' + before}")
            seen += [item["value"] for item in page["items"]]
            before = page["next_before"]

        assert seen == [4, 3, 2, 1, 0]

    async def test_a_time_without_a_zone_is_refused(self, client: Client) -> None:
        metrics = [{"name": "m", "value": 1, "reported_at": "2026-01-01T00:00:00"}]

        status, problem = await post(
            client, "/api/metrics/report", {"component": "c", "metrics": metrics}
        )

        assert status == 422
        assert "timezone" in problem["detail"]

    @pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
    async def test_the_ends_of_the_calendar_are_moments_in_any_zone(
        self, client: Client, moment: str
    ) -> None:
        sample = {"name": "m", "value": 1, "reported_at": moment}

        status, _ = await post(
            client, "/api/metrics/report", {"component": "c", "metrics": [sample]}
        )
        found = await client.get("/api/metrics/query", params={"since": moment, "until": moment})

        assert (status, found.status_code) == (202, 200)
        (item,) = (await get(client, "/api/metrics/query?name=m"))["items"]
        assert datetime.fromisoformat(item["reported_at"]) <= datetime.now(UTC)

    async def test_a_moment_past_the_end_of_the_calendar_is_refused(self, client: Client) -> None:
        answer = await client.get("/api/metrics/query?since=253402300800")

        assert answer.status_code == 422
        assert "year 10000" in answer.json()["detail"]
