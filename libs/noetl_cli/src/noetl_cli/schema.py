"""The schema of the database, as the migrations make it."""

import asyncio
import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.stack.child import Child
from noetl_cli.stack.data_dir import DataDir, default_data_dir
from noetl_cli.stack.migrations import apply_migrations
from noetl_cli.stack.ports import choose_ports
from noetl_cli.stack.postgres import PostgresCluster
from noetl_cli.stack.state import read_running
from noetl_core.store.migration_status import MigrationState
from noetl_core.store.migrations import schema_dump


def database_of_dev() -> str:
    state = read_running(DataDir(default_data_dir()))
    if state is None:
        raise CommandFailed(
            "which database? Name it with --dsn, or start `noetl dev`.", exit_code=EXIT_USAGE
        )
    return state.dsn


def described(states: Sequence[MigrationState]) -> Iterator[str]:
    """A line a migration, and how many there are of each kind."""
    for state in states:
        yield f"{state.name:<32} {_standing(state)}"
    counts = Counter(state.standing for state in states)
    yield ", ".join(f"{count} {standing}" for standing, count in counts.items())


def _standing(state: MigrationState) -> str:
    match state.standing:
        case "applied":
            return f"applied {state.applied_at:%Y-%m-%d %H:%M:%S} UTC"
        case "begun":
            return f"begun: {state.statements_done} of {state.statements} statements are done"
        case "changed":
            return "applied with other content than it has now: restore the file"
        case "newer":
            return "applied by a newer version of NoETL"
        case "open":
            return "open"


async def dump_schema(dsn: str) -> str:
    """Without a database, one is made for the purpose."""
    if dsn:
        return await asyncio.to_thread(schema_dump, dsn)
    async with temporary_database() as made:
        await apply_migrations(made)
        return await asyncio.to_thread(schema_dump, made)


@contextlib.asynccontextmanager
async def temporary_database() -> AsyncIterator[str]:
    root = Path(tempfile.mkdtemp(prefix="noetl-"))
    port = choose_ports(["postgres"], {})["postgres"]
    cluster = PostgresCluster(root / "postgres", port=port, is_discarded=True)
    child = Child(cluster.program(), root)
    try:
        await cluster.create()
        await child.start()
        await child.ready()
        yield cluster.dsn
    finally:
        await child.stop(is_discarded=True)
        shutil.rmtree(root, ignore_errors=True)
