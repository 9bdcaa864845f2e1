"""api-key create, list, revoke."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from typing import Annotated

import typer

from noetl_cli.commands.database import Dsn
from noetl_cli.terminal import say

app = typer.Typer(help="API keys: who may ask what.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose it is.")]


@app.command("create")
def create(
    name: Name,
    role: Annotated[str, typer.Option(help="reader, operator or admin.")],
    days: Annotated[
        int | None, typer.Option(min=1, max=36_500, help="How long it counts; by default for ever.")
    ] = None,
    dsn: Dsn = "",
) -> None:
    """Make a key and print it, this once. The database keeps its digest."""
    from noetl_cli.api_keys import create_key
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.schema import database_of_dev

    key = run_until_signal(create_key(dsn or database_of_dev(), name, role=role, days=days))
    say("send it as `Authorization: Bearer KEY`; it is not shown again")
    typer.echo(key)


@app.command("list")
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
    dsn: Dsn = "",
) -> None:
    """List the keys, with their roles and whether they count."""
    from noetl_cli.api_keys import print_keys
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.schema import database_of_dev

    run_until_signal(print_keys(dsn or database_of_dev(), as_json=as_json))


@app.command("revoke")
def revoke(name: Name, dsn: Dsn = "") -> None:
    """Let a key count no more, from now on."""
    from noetl_cli.api_keys import revoke_key
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.schema import database_of_dev

    run_until_signal(revoke_key(dsn or database_of_dev(), name))
    say(f"the key {name} is revoked")
