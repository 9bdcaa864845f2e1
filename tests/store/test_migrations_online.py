"""store/migrations.py while others work: nobody waits for it for long, and it can die anywhere."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_core.store.migration_file import NO_TRANSACTION, migrations_directory
from noetl_core.store.migration_locks import MigrationBlockedError, Patience
from noetl_core.store.migration_status import MigrationState, fit, status
from noetl_core.store.migrations import (
    MigrationChangedError,
    MigrationFailedError,
    MigrationForbiddenError,
    Progress,
    migrate,
)
from noetl_core.store.postgres import Connection, Pool
from support.postgres import PostgresServer

ALTER = "ALTER TABLE noetl.command ADD COLUMN extra text;"
INDEX = (
    f"{NO_TRANSACTION}\nCREATE INDEX CONCURRENTLY event_node_idx ON noetl.event (node_name)"
    " WHERE node_name IS NOT NULL;"
)
READ = "SELECT count(*) FROM noetl.command"

Connect = Callable[[], Awaitable[Connection]]


@pytest.fixture
async def connect(database: str) -> AsyncIterator[Connect]:
    """Sessions of others, closed at the end."""
    opened: list[asyncpg.Connection] = []

    async def one() -> Connection:
        opened.append(await asyncpg.connect(database))
        return opened[-1]

    yield one
    for conn in opened:
        conn.terminate()


@pytest.fixture
async def conn(connect: Connect) -> Connection:
    return await connect()


def write(directory: Path, sql: str, name: str = "0100_sample.sql") -> Path:
    (directory / name).write_text(sql)
    return directory


async def indexes(conn: Connection | Pool, name: str = "event_node_idx") -> dict[str, bool]:
    """Which tables have the index, or a part of it, and whether it is valid."""
    rows = await conn.fetch(
        "SELECT t.relname, i.indisvalid FROM pg_index i JOIN pg_class t ON t.oid = i.indrelid"
        " JOIN pg_class x ON x.oid = i.indexrelid WHERE x.relname ~ $1",
        f"{name}$",
    )
    return {row["relname"]: row["indisvalid"] for row in rows}


async def has_column(conn: Connection | Pool, table: str, column: str) -> bool:
    found = await conn.fetchval(
        "SELECT count(*) FROM pg_attribute WHERE attrelid = $1::text::regclass AND attname = $2",
        f"noetl.{table}",
        column,
    )
    return bool(found)


@pytest.mark.slow
@pytest.mark.measured
async def test_a_long_transaction_delays_the_migration_and_nobody_else(
    connect: Connect, conn: Connection, tmp_path: Path
) -> None:
    blocker, reader = await connect(), await connect()
    blocking = blocker.transaction()
    await blocking.start()
    await blocker.fetch(READ)
    told: list[Progress] = []

    migrating = asyncio.create_task(
        migrate(conn, directory=write(tmp_path, ALTER), tell=told.append)
    )
    released = asyncio.create_task(asyncio.sleep(3.0))
    longest = await longest_wait(reader, until=released)
    assert not migrating.done(), "it was never in the way: this has shown nothing"
    assert longest > 0.3, "nobody had to wait: this has shown nothing"
    await blocking.rollback()

    assert await migrating == ["0100_sample.sql"]
    assert longest < 1.0
    waits = [progress.text for progress in told if progress.is_waiting]
    assert str(blocker.get_server_pid()) in waits[-1]
    assert "idle in transaction" in waits[-1]


@pytest.mark.slow
@pytest.mark.measured
async def test_several_statements_together_keep_the_others_waiting_no_longer_than_one(
    connect: Connect, conn: Connection, tmp_path: Path
) -> None:
    """The locks of the first are held while the next ones wait for theirs."""
    reader = await connect()
    blocked = ("timer", "inbox", "result_ref")
    tables = ("command", *blocked)
    held = asyncio.Barrier(len(blocked) + 1)
    sql = "\n".join(f"ALTER TABLE noetl.{table} ADD COLUMN extra text;" for table in tables)

    async def hold(table: str, seconds: float) -> None:
        async with held_open(connect, table):
            await held.wait()
            await asyncio.sleep(seconds)

    holds = [asyncio.create_task(hold(table, 0.6 * n)) for n, table in enumerate(blocked, 1)]
    await held.wait()
    patience = Patience(lock_seconds=0.9)
    directory = write(tmp_path, sql)
    migrating = asyncio.create_task(migrate(conn, directory=directory, patience=patience))
    longest = await longest_wait(reader, until=migrating)
    await asyncio.gather(*holds)

    assert await migrating == ["0100_sample.sql"]
    assert 0.5 < longest < 1.5


async def test_a_migration_that_gets_no_lock_gives_up_and_says_who_is_in_the_way(
    connect: Connect, conn: Connection, tmp_path: Path
) -> None:
    blocker = await connect()
    blocking = blocker.transaction()
    await blocking.start()
    await blocker.fetch(READ)

    with pytest.raises(MigrationBlockedError, match=str(blocker.get_server_pid())) as caught:
        await migrate(
            conn,
            directory=write(tmp_path, f"CREATE TABLE noetl.half (); {ALTER}"),
            patience=Patience(lock_seconds=0.05, seconds=0.2),
        )

    assert "0100_sample.sql" in str(caught.value)
    await blocking.rollback()
    assert await conn.fetchval("SELECT to_regclass('noetl.half')") is None
    assert not await has_column(conn, "command", "extra")
    assert await migrate(conn, directory=tmp_path) == ["0100_sample.sql"]


async def test_in_a_deadlock_with_a_service_it_is_the_migration_that_lets_go(
    connect: Connect, conn: Connection, tmp_path: Path
) -> None:
    service = await connect()
    told: list[Progress] = []
    sql = (
        "ALTER TABLE noetl.inbox ADD COLUMN extra text; SELECT pg_sleep(0.3);"
        "ALTER TABLE noetl.timer ADD COLUMN extra text;"
    )

    async with service.transaction():
        await service.execute("LOCK TABLE noetl.timer IN ROW EXCLUSIVE MODE")
        migrating = asyncio.create_task(
            migrate(conn, directory=write(tmp_path, sql), tell=told.append)
        )
        await until(lambda: has_locked(connect, "inbox", by=conn))
        # Held by the migration, which comes to want what we hold: one of us must let go.
        await service.execute("LOCK TABLE noetl.inbox IN ROW EXCLUSIVE MODE")

    assert await migrating == ["0100_sample.sql"]
    assert any(progress.is_waiting for progress in told)


async def test_an_index_on_a_partitioned_table_is_made_while_others_write(
    connect: Connect, conn: Connection, tmp_path: Path
) -> None:
    await ensure_partition(conn, "event_2026w30", 3000)
    async with held_open(connect, "event_2026w30"):
        migrating = asyncio.create_task(migrate(conn, directory=write(tmp_path, INDEX)))
        await until(lambda: is_building(connect))
        # It waits for that transaction; whoever comes meanwhile can write and read at once.
        other = await connect()
        await other.execute("SET lock_timeout = '5s'")
        await insert_event(other, 3010)
        await insert_event(other, 1)
        assert await other.fetchval("SELECT count(*) FROM noetl.event") == 2

    assert await migrating == ["0100_sample.sql"]
    assert await indexes(conn) == {"event": True, "event_default": True, "event_2026w30": True}
    await ensure_partition(conn, "event_2026w31", 3100)
    assert await parts_of_index(conn) == 3


async def test_partitions_that_come_and_go_meanwhile_do_not_disturb(
    connect: Connect, conn: Connection, tmp_path: Path
) -> None:
    await ensure_partition(conn, "event_2026w30", 3000)
    await ensure_partition(conn, "event_2026w31", 3100)
    async with held_open(connect, "event_2026w30"):
        migrating = asyncio.create_task(migrate(conn, directory=write(tmp_path, INDEX)))
        await until(lambda: is_building(connect))
        other = await connect()
        await other.execute("ALTER TABLE noetl.event DETACH PARTITION noetl.event_2026w31")
        await other.execute("DROP TABLE noetl.event_2026w31")
        await ensure_partition(other, "event_2026w32", 3200)

    assert await migrating == ["0100_sample.sql"]
    assert await indexes(conn) == {"event": True, "event_default": True, "event_2026w30": True}
    assert await parts_of_index(conn) == 3, "the partition that came has no part of it"


@pytest.mark.parametrize("table", ["event", "command"])
async def test_an_index_whose_build_was_killed_is_made_again(
    connect: Connect, conn: Connection, tmp_path: Path, table: str
) -> None:
    name = f"{table}_sample_idx"
    create = f"CREATE INDEX CONCURRENTLY {name} ON noetl.{table} (attempt);"
    directory = write(tmp_path, f"{NO_TRANSACTION}\n{create}")
    killed = await connect()
    async with held_open(connect, "event_default" if table == "event" else table):
        migrating = asyncio.create_task(migrate(killed, directory=directory))
        await until(lambda: is_building(connect))
        await conn.execute("SELECT pg_terminate_backend($1)", killed.get_server_pid())
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, MigrationFailedError)):
            await migrating
    assert False in (await indexes(conn, name)).values(), "nothing was left behind"

    assert await migrate(conn, directory=directory) == ["0100_sample.sql"]

    assert set((await indexes(conn, name)).values()) == {True}
    assert await migrate(conn, directory=directory) == []


async def test_a_concurrent_index_that_cannot_be_leaves_nothing_behind(
    conn: Connection, tmp_path: Path
) -> None:
    await conn.execute("INSERT INTO noetl.timer VALUES (1, 'a', now()), (2, 'a', now())")
    sql = (
        f"{NO_TRANSACTION}\nCREATE UNIQUE INDEX CONCURRENTLY timer_name_idx ON noetl.timer (timer);"
    )

    with pytest.raises(MigrationFailedError, match="could not create unique index"):
        await migrate(conn, directory=write(tmp_path, sql))

    assert await indexes(conn, "timer_name_idx") == {}
    await conn.execute("DELETE FROM noetl.timer WHERE execution_id = 2")
    assert await migrate(conn, directory=tmp_path) == ["0100_sample.sql"]
    assert await indexes(conn, "timer_name_idx") == {"timer": True}


async def test_two_that_migrate_at_once_do_not_wait_for_each_other_forever(
    connect: Connect, tmp_path: Path
) -> None:
    """The one that waits must not be a transaction that the other one's index waits for."""
    directory = write(tmp_path, INDEX)

    answers = await asyncio.gather(
        *[migrate(await connect(), directory=directory) for _ in range(3)]
    )

    assert sorted(answers) == [[], [], ["0100_sample.sql"]]


async def test_a_file_without_a_transaction_goes_on_where_it_failed(
    conn: Connection, tmp_path: Path
) -> None:
    first = "CREATE TABLE noetl.counted (n integer); INSERT INTO noetl.counted VALUES (1);"
    directory = write(tmp_path, f"{NO_TRANSACTION}\n{first}\nSELECT 1 / 0;\n{ALTER}")

    with pytest.raises(MigrationFailedError, match=r"statement 3 of 4 \(line 3\)") as caught:
        await migrate(conn, directory=directory)
    assert "2 statements are done" in str(caught.value)
    assert [(s.standing, s.statements_done) for s in await ours(conn, directory)] == [("begun", 2)]
    write(tmp_path, f"{NO_TRANSACTION}\n{first}\nSELECT 1;\n{ALTER}")

    assert await migrate(conn, directory=directory) == ["0100_sample.sql"]
    assert await conn.fetchval("SELECT count(*) FROM noetl.counted") == 1
    assert await has_column(conn, "command", "extra")


async def test_what_was_done_of_a_file_must_not_change(conn: Connection, tmp_path: Path) -> None:
    directory = write(tmp_path, f"{NO_TRANSACTION}\nSELECT 1; SELECT 1 / 0;")
    with pytest.raises(MigrationFailedError):
        await migrate(conn, directory=directory)
    write(tmp_path, f"{NO_TRANSACTION}\nSELECT 2; SELECT 1;")

    with pytest.raises(MigrationChangedError, match="statement 1 of migration 0100_sample"):
        await migrate(conn, directory=directory)


async def test_nothing_is_applied_while_an_old_file_has_changed(
    conn: Connection, tmp_path: Path
) -> None:
    directory = write(tmp_path, "SELECT 1;", "0102_last.sql")
    await migrate(conn, directory=directory)
    write(tmp_path, "SELECT 2;", "0102_last.sql")
    write(tmp_path, ALTER, "0101_fresh.sql")

    with pytest.raises(MigrationChangedError, match="0102_last"):
        await migrate(conn, directory=directory)

    assert not await has_column(conn, "command", "extra")
    assert [s.standing for s in await ours(conn, directory)] == ["open", "changed"]


async def test_the_message_of_a_failure_has_the_statement_the_reason_and_what_to_do(
    conn: Connection, tmp_path: Path
) -> None:
    directory = write(tmp_path, "-- why\nSELECT 1;\nALTER TABLE noetl.nothing ADD COLUMN a int;")

    with pytest.raises(MigrationFailedError) as caught:
        await migrate(conn, directory=directory)

    failed = "0100_sample.sql, statement 2 of 2 (line 3) failed"
    assert str(caught.value).splitlines() == [
        f'{failed}: relation "noetl.nothing" does not exist',
        "  ALTER TABLE noetl.nothing ADD COLUMN a int",
        "Nothing of this file was kept. Mend it, then run `noetl db migrate` again.",
    ]


async def test_who_may_not_migrate_is_told_so(connect: Connect, tmp_path: Path) -> None:
    conn = await connect()
    await conn.execute("SET ROLE noetl_worker")

    with pytest.raises(MigrationForbiddenError, match="as the owner of the tables"):
        await migrate(conn, directory=write(tmp_path, ALTER))


async def test_a_migrator_that_waits_for_another_gives_up_in_the_end(
    connect: Connect, conn: Connection, tmp_path: Path
) -> None:
    holder = await connect()
    await holder.execute("SELECT pg_advisory_lock(hashtext('noetl.schema_migration'))")

    with pytest.raises(MigrationBlockedError, match="another migration"):
        await migrate(conn, directory=write(tmp_path, ALTER), patience=Patience(seconds=0.3))


@pytest.mark.slow
@pytest.mark.measured
async def test_an_autovacuum_that_is_in_the_way_is_ended(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    own_postgres.stop()
    own_postgres.options |= {"autovacuum": "on", "autovacuum_naptime": "1s"}
    own_postgres.start()
    conn = await asyncpg.connect(own_postgres.dsn())
    await migrate(conn)
    await conn.execute(
        "ALTER TABLE noetl.metric SET (autovacuum_vacuum_threshold = 1,"
        " autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 100,"
        " autovacuum_vacuum_cost_limit = 1)"
    )
    await conn.execute(
        "INSERT INTO noetl.metric (name, value) SELECT 'a', 1 FROM generate_series(1, 200000)"
    )
    await conn.execute("UPDATE noetl.metric SET value = 2")

    async def is_vacuumed() -> bool:
        found = await conn.fetchval(
            "SELECT count(*) FROM pg_stat_progress_vacuum"
            " WHERE relid = 'noetl.metric'::regclass AND heap_blks_scanned > 0"
        )
        return bool(found)

    await until(is_vacuumed, seconds=120)

    begun = time.monotonic()
    directory = write(tmp_path, "ALTER TABLE noetl.metric ADD COLUMN extra text;")
    assert await migrate(conn, directory=directory) == ["0100_sample.sql"]
    assert time.monotonic() - begun < 3.0
    await conn.close()


async def test_a_database_fits_the_version_that_knows_all_its_migrations(
    empty_database: str, tmp_path: Path
) -> None:
    conn = await asyncpg.connect(empty_database)
    names = sorted(file.name for file in migrations_directory().glob("*.sql"))
    assert await fit(conn) == (names, [])
    assert {s.standing for s in await status(conn)} == {"open"}

    await migrate(conn)
    assert await fit(conn) == ([], [])
    assert {s.standing for s in await status(conn)} == {"applied"}

    await migrate(conn, directory=write(tmp_path, "SELECT 1;"))
    assert await fit(conn) == ([], ["0100_sample.sql"])
    assert (await status(conn))[-1].standing == "newer"
    await conn.close()


async def ours(conn: Connection, directory: Path) -> list[MigrationState]:
    states = await status(conn, directory=directory)
    return [state for state in states if state.name.startswith("01")]


async def longest_wait(conn: Connection, *, until: "asyncio.Task[Any]") -> float:
    """How long anybody who reads the queue had to wait for it."""
    longest = 0.0
    while not until.done():
        asked_at = time.monotonic()
        await conn.fetch(READ)
        longest = max(longest, time.monotonic() - asked_at)
        await asyncio.sleep(0.01)
    return longest


@asynccontextmanager
async def held_open(connect: Connect, table: str) -> AsyncIterator[None]:
    """A transaction that has written to the table and is not over yet."""
    conn = await connect()
    async with conn.transaction():
        await conn.execute(f"LOCK TABLE noetl.{table} IN ROW EXCLUSIVE MODE")
        yield


async def ensure_partition(conn: Connection, name: str, lower: int) -> None:
    await conn.execute(
        "SELECT noetl.ensure_partition('event', $1, $2, $3)", name, lower, lower + 100
    )


async def parts_of_index(conn: Connection) -> int:
    parent = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'noetl.event_node_idx'::regclass"
    return int(await conn.fetchval(parent))


async def insert_event(conn: Connection, execution_id: int) -> None:
    await conn.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
        " VALUES ($1, 1, 'k', 0, 'step.enter')",
        execution_id,
    )


async def has_locked(connect: Connect, table: str, *, by: Connection) -> bool:
    conn = await connect()
    try:
        found = await conn.fetchval(
            "SELECT count(*) FROM pg_locks"
            " WHERE pid = $1 AND relation = $2::text::regclass AND granted",
            by.get_server_pid(),
            f"noetl.{table}",
        )
        return bool(found)
    finally:
        await conn.close()


async def is_building(connect: Connect) -> bool:
    """An index is under way and waits for others."""
    conn = await connect()
    try:
        found = await conn.fetchval(
            "SELECT count(*) FROM pg_stat_progress_create_index"
            " WHERE datname = current_database() AND phase LIKE 'waiting%'"
        )
        return bool(found)
    finally:
        await conn.close()


async def until(holds: Callable[[], Awaitable[bool]], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, f"it did not happen in {seconds} s"
        await asyncio.sleep(0.05)
