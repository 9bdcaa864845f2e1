"""db migrate, db status, db dump, db rebuild-projection."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from pathlib import Path
from typing import Annotated

import typer

from noetl_cli.terminal import say

app = typer.Typer(help="The database: its schema and migrations.", no_args_is_help=True)

Dsn = Annotated[
    str,
    typer.Option(
        metavar="URL", envvar="NOETL_POSTGRES_DSN", help="The database.", show_default=False
    ),
]


Directory = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Migrations other than those of this version.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]


@app.command()
def migrate(
    dsn: Dsn = "",
    directory: Directory = None,
    lock_timeout: Annotated[
        float,
        typer.Option(
            metavar="S", min=0.01, max=0.9, help="How long anybody may have to wait behind us."
        ),
    ] = 0.5,
    patience: Annotated[
        float, typer.Option(metavar="S", min=0, help="How long to come again for a lock.")
    ] = 600.0,
) -> None:
    """Bring a database up to this version's schema (by default that of the running `noetl dev`).

    The system may run. Each file is applied once, as a whole or not at all.
    """
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.schema import database_of_dev
    from noetl_cli.stack.migrations import apply_migrations, tell_all
    from noetl_core.store.migration_locks import Patience

    work = apply_migrations(
        dsn or database_of_dev(),
        directory=directory,
        tell=tell_all,
        patience=Patience(lock_seconds=lock_timeout, seconds=patience),
    )
    applied = run_until_signal(work)
    typer.echo("\n".join(applied) if applied else "nothing to do: the schema is up to date")


@app.command()
def status(
    dsn: Dsn = "",
    directory: Directory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """List the migrations: which are applied, which are open."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.schema import database_of_dev, described
    from noetl_cli.stack.migrations import migration_states
    from noetl_cli.terminal import print_answer

    states = run_until_signal(migration_states(dsn or database_of_dev(), directory=directory))
    rows = [state._asdict() for state in states]
    print_answer(rows, as_json=as_json, text=lambda: "\n".join(described(states)))


@app.command()
def dump(
    dsn: Annotated[
        str, typer.Option(metavar="URL", help="A migrated database; by default a temporary one.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; by default stdout.")
    ] = None,
) -> None:
    """Write the schema that all migrations together make."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.schema import dump_schema

    text = run_until_signal(dump_schema(dsn))
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
        say(f"wrote {output}")


@app.command("rebuild-projection")
def rebuild_projection(
    dsn: Dsn = "",
    execution: Annotated[
        int | None, typer.Option(metavar="ID", help="Of this execution alone.", min=1)
    ] = None,
) -> None:
    """Fold the log again and mend every status row that differs. The system may run."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.rebuild import rebuild_all, rebuild_one
    from noetl_cli.schema import database_of_dev
    from noetl_core.domain.ids import ExecutionId

    def tell(folded: int, written: int) -> None:
        say(f"{folded} executions folded, {written} rows written anew")

    database = dsn or database_of_dev()
    work = (
        rebuild_all(database, tell)
        if execution is None
        else rebuild_one(database, ExecutionId(execution))
    )
    done = run_until_signal(work)
    typer.echo(f"{done.folded} executions folded, {done.written} rows written anew")
