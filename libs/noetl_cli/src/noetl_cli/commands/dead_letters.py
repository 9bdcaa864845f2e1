"""dead-letters list, show, retry, discard."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from typing import Annotated

import typer

from noetl_cli.terminal import say

app = typer.Typer(
    help="What could not be processed: look at it, try it again, discard it.",
    no_args_is_help=True,
)

LetterId = Annotated[str, typer.Argument(metavar="ID", help="The dead letter.")]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


@app.command("list")
def list_letters(
    execution: Annotated[
        int | None, typer.Option(metavar="ID", min=1, help="Only of this execution.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Only from broker, command, projection, projection.differs or reaper."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    as_json: Json = False,
) -> None:
    """List them, the newest first."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.set_aside import print_letters

    run_until_signal(print_letters(execution, source, limit=limit, as_json=as_json))


@app.command("show")
def show(letter: LetterId, as_json: Json = False) -> None:
    """Show why one was set aside, and what it says."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.set_aside import print_letter

    run_until_signal(print_letter(letter, as_json=as_json))


@app.command("retry")
def retry(letter: LetterId) -> None:
    """Try it again, and print the id of the execution that goes on."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.set_aside import retry_letter

    retried = run_until_signal(retry_letter(letter))
    say(f"dead letter {letter}: {retried.did}; noetl status {retried.execution_id}")
    typer.echo(retried.execution_id)


@app.command("discard")
def discard(letter: LetterId) -> None:
    """Remove it for good; the audit says that it was there."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.set_aside import discard_letter

    run_until_signal(discard_letter(letter))
    say(f"dead letter {letter} is discarded")
