"""The embedded Postgres: made once, recovered after a kill -9, whatever was left behind."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import psutil

from noetl_cli.stack.child import Child
from noetl_cli.stack.ports import choose_ports
from noetl_cli.stack.postgres import PostgresCluster


@contextlib.asynccontextmanager
async def running(cluster: PostgresCluster, logs: Path) -> AsyncIterator[Child]:
    child = Child(cluster.program(), logs)
    await cluster.create()
    await child.start()
    try:
        await child.ready()
        yield child
    finally:
        await child.stop(is_discarded=True)


def cluster_in(folder: Path) -> PostgresCluster:
    return PostgresCluster(folder / "postgres", port=choose_ports(["postgres"], {})["postgres"])


async def ask(cluster: PostgresCluster, statement: str) -> object:
    connection = await asyncpg.connect(cluster.dsn)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def test_what_was_committed_is_there_after_a_kill_of_the_whole_server(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    async with running(cluster, tmp_path) as child:
        await ask(cluster, "CREATE TABLE kept AS SELECT 42 AS number")
        assert child.record is not None
        os.kill(child.record.pid, signal.SIGKILL)
        await child.ended()

    async with running(cluster, tmp_path):
        assert await ask(cluster, "SELECT number FROM kept") == 42


async def test_a_pid_file_that_names_a_living_stranger_is_no_obstacle(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    async with running(cluster, tmp_path):
        text = (cluster.directory / "postmaster.pid").read_text()
    lines = text.splitlines()
    stranger = os.getpid()
    (cluster.directory / "postmaster.pid").write_text("\n".join([str(stranger), *lines[1:]]))

    async with running(cluster, tmp_path):
        assert await ask(cluster, "SELECT 1") == 1
    assert psutil.pid_exists(stranger)


async def test_a_server_that_somebody_left_running_in_the_directory_is_ended(
    tmp_path: Path,
) -> None:
    cluster = cluster_in(tmp_path)
    async with running(cluster, tmp_path) as forgotten:
        async with running(cluster, tmp_path) as child:
            assert await ask(cluster, "SELECT 1") == 1
            assert child.is_running
        assert await forgotten.ended() == -signal.SIGKILL


async def test_an_initdb_that_was_killed_leaves_no_cluster(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    half = tmp_path / "postgres.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")

    async with running(cluster, tmp_path):
        assert await ask(cluster, "SELECT 1") == 1


async def test_it_keeps_every_promise_of_durability(tmp_path: Path) -> None:
    cluster = cluster_in(tmp_path)
    async with running(cluster, tmp_path):
        settings = [
            await ask(cluster, f"SHOW {name}")
            for name in ("fsync", "synchronous_commit", "full_page_writes")
        ]
        assert settings == ["on", "on", "on"]
        assert await ask(cluster, "SHOW listen_addresses") == "127.0.0.1"
