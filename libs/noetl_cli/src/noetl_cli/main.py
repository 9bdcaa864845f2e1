"""The `noetl` command: its subcommands, and what becomes of an error."""

import os
import signal
import sys

import typer

from noetl_cli.commands import (
    api_keys,
    archives,
    authoring,
    bench,
    control,
    credentials,
    database,
    dead_letters,
    dev,
    executions,
    playbooks,
    shards,
    version,
)
from noetl_cli.failure import CommandFailed, Interrupted

app = typer.Typer(
    name="noetl",
    help="Durable playbooks: run them, watch them, and run the system they need.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Help as plain text: the pretty one takes longer to import than most commands to run.
    rich_markup_mode=None,
)
app.command("run")(executions.run)
app.add_typer(dev.app, name="dev")
app.command("validate")(playbooks.validate)
app.command("register")(playbooks.register)
app.command("test")(authoring.run_tests)
app.command("render")(authoring.render)
app.command("schema")(playbooks.schema)
app.command("executions")(executions.list_newest)
app.command("status")(executions.status)
app.command("events")(executions.events)
app.command("explain")(executions.explain)
app.command("workers")(executions.workers)
app.command("cancel")(control.cancel)
app.command("pause")(control.pause)
app.command("resume")(control.resume)
app.command("retry")(control.retry)
app.command("rerun")(control.rerun)
app.command("fork")(control.fork)
app.command("signal")(control.signal)
app.command("approve")(control.approve)
app.command("deny")(control.deny)
app.add_typer(credentials.app, name="credential")
app.add_typer(api_keys.app, name="api-key")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(database.app, name="db")
app.add_typer(shards.app, name="shards")
app.command("sql")(archives.sql)
app.command("bench")(bench.bench)
app.command("version")(version.version)


def main() -> None:
    try:
        app()
    except CommandFailed as failure:
        typer.echo(str(failure), err=True)
        sys.exit(failure.exit_code)
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.number)
    except BrokenPipeError:
        # Whoever read our output (`| head`) has enough; Python would complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


if __name__ == "__main__":
    main()
