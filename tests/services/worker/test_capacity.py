"""What a worker says of itself in noetl.runtime: once at the start, and with every heartbeat."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from noetl_core.process.membership import NameTakenError
from noetl_core.store.postgres import Pool
from noetl_worker.config import uri_of
from services.worker.desk import config, working


async def said(pool: Pool, name: str = "worker-a") -> dict[str, Any]:
    """The row of the worker as soon as a heartbeat has said what is in use."""
    found = None
    async with asyncio.timeout(60):
        while found is None:
            await asyncio.sleep(0.05)
            found = await pool.fetchrow(
                "SELECT capacity, labels, uri, runtime FROM noetl.runtime"
                " WHERE kind = 'worker' AND name = $1 AND runtime ? 'free'",
                name,
            )
    labels, runtime = msgspec.json.decode(found["labels"]), msgspec.json.decode(found["runtime"])
    return {"capacity": found["capacity"], "labels": labels, "uri": found["uri"], **runtime}


async def test_every_heartbeat_says_how_much_is_in_use(
    database: str, nats_url: str, pool: Pool
) -> None:
    configuration = config(
        database,
        nats_url,
        worker_heartbeat_interval=0.05,
        worker_slots=7,
        python_processes=3,
        worker_tool_slots=("http=5",),
    )

    async with working(configuration):
        found = await said(pool)

    assert (found["capacity"], found["slots"], found["running"], found["free"]) == (7, 7, 0, 7)
    assert found["tools"]["python"] == {"slots": 3, "free": 3}
    assert found["tools"]["postgres"] == {"slots": 4, "free": 4}
    assert found["tools"]["http"] == {"slots": 5, "free": 5}
    assert found["pid"] > 0


async def test_a_worker_says_from_its_first_moment_how_much_is_free(
    database: str, nats_url: str, pool: Pool
) -> None:
    async with working(config(database, nats_url, worker_heartbeat_interval=30, worker_slots=7)):
        found = await said(pool)

    assert (found["slots"], found["running"], found["free"]) == (7, 0, 7)


async def test_a_worker_says_from_its_first_moment_how_often_it_will_be_heard_of(
    database: str, nats_url: str, pool: Pool
) -> None:
    async with working(config(database, nats_url, worker_heartbeat_interval=30)):
        said_at_once = await pool.fetchval(
            "SELECT runtime->'heartbeat_interval_seconds' FROM noetl.runtime WHERE kind = 'worker'"
        )

    assert float(said_at_once) == 30


async def test_two_names_of_one_worker_id_are_one_name(
    database: str, nats_url: str, pool: Pool
) -> None:
    first = config(database, nats_url, instance="node.7", worker_heartbeat_interval=0.05)
    second = config(database, nats_url, instance="node-7", worker_heartbeat_interval=0.05)

    async def both() -> None:
        async with working(first) as service, working(second), asyncio.timeout(60):
            await service.wait_for_death()

    with pytest.raises(NameTakenError, match="another worker runs under the name 'node-7'"):
        await both()


async def test_a_worker_registers_its_pool_and_its_labels(
    database: str, nats_url: str, pool: Pool
) -> None:
    configuration = config(
        database,
        nats_url,
        worker_heartbeat_interval=0.05,
        worker_pool="gpu",
        worker_pool_name="big ones",
        worker_slots=2,
        worker_labels=("fast", "zone=eu"),
    )

    async with working(configuration):
        found = await said(pool)

    assert found["capacity"] == found["slots"] == 2
    labels = {"pool": "gpu", "pool_name": "big ones", "fast": "true", "zone": "eu"}
    assert found["labels"] == labels
    assert (found["uri"], found["type"]) == (uri_of(configuration), "gpu")


def test_in_a_pod_the_uri_names_the_namespace_and_the_pod(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("flows\n")
    here = config("postgresql://nobody", "nats://nobody")

    assert uri_of(here, namespace_file=tmp_path / "namespace") == (
        f"k8s://flows/{socket.gethostname()}"
    )
    assert uri_of(here, namespace_file=tmp_path / "none") == f"local://{socket.gethostname()}"
    given = msgspec.structs.replace(here, worker_uri="vm://rack-7/a")
    assert uri_of(given, namespace_file=tmp_path / "namespace") == "vm://rack-7/a"
