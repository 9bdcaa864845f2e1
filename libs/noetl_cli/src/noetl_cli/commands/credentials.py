"""credential set, list, delete."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from typing import Annotated

import typer

from noetl_cli.terminal import say

app = typer.Typer(help="Credentials: they go in, and never come out.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What `auth:` in a playbook calls it.")]


@app.command("set")
def set_credential(
    name: Name,
    kind: Annotated[str, typer.Option("--type", help="What it opens: postgres, bearer, ...")],
    data: Annotated[
        str,
        typer.Option(
            metavar="JSON|@FILE|-", help="Its fields as JSON: here, in a file, or on stdin."
        ),
    ],
) -> None:
    """Store a credential, encrypted; one of that name is replaced."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.vault import store_credential

    run_until_signal(store_credential(name, kind=kind, data=data))
    say(f"credential {name} is stored")


@app.command("list")
def list_credentials(
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """List the credentials by name and type."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.vault import print_credentials

    run_until_signal(print_credentials(as_json=as_json))


@app.command("delete")
def delete_credential(name: Name) -> None:
    """Delete a credential."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.vault import remove_credential

    run_until_signal(remove_credential(name))
    say(f"credential {name} is deleted")
