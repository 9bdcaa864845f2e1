"""shards, shards resize."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from typing import Annotated

import typer

from noetl_cli.terminal import say

app = typer.Typer(help="Who owns which shard, and how many there are.")

Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


@app.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: Json = False) -> None:
    """Show every shard with its owner, its lease and how far it is behind."""
    if context.invoked_subcommand is not None:
        return
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.topology import show_shards

    run_until_signal(show_shards(as_json=as_json))


@app.command()
def resize(
    count_from: Annotated[int, typer.Argument(metavar="FROM", min=1, help="The count of now.")],
    count_to: Annotated[
        int, typer.Argument(metavar="TO", min=1, max=1024, help="The count that you want.")
    ],
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0, help="Wait so long for it to be done.")
    ] = 60.0,
) -> None:
    """Change the number of shards while everything runs."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.topology import resize_shards

    run_until_signal(resize_shards(count_from, count_to, seconds=timeout))
    say(f"there are {count_to} shards now; look with: noetl shards")
