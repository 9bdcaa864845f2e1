"""dev, dev ps, dev info."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noetl_cli.failure import CommandFailed, Interrupted
from noetl_cli.terminal import print_answer, say

if TYPE_CHECKING:
    from noetl_cli.stack.state import StackState

app = typer.Typer(
    help="Run the whole system here: Postgres, NATS and every service, with data that stays."
)

DataDirOption = Annotated[
    Path | None, typer.Option(metavar="D", help="Where the data is kept.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


@app.callback(invoke_without_command=True)
def dev(
    context: typer.Context,
    data_dir: DataDirOption = None,
    port: Annotated[
        int, typer.Option(metavar="P", min=0, max=65535, help="Port of the gateway; 0 keeps one.")
    ] = 0,
    postgres: Annotated[
        str, typer.Option(metavar="URL", help="Use this Postgres instead of our own.")
    ] = "",
    nats: Annotated[
        str, typer.Option(metavar="URL", help="Use this NATS instead of our own.")
    ] = "",
    workers: Annotated[int, typer.Option(metavar="N", min=0, max=64, help="Worker processes.")] = 1,
    processes: Annotated[
        bool, typer.Option("--processes", help="One process a service instead of one for all.")
    ] = False,
    brokers: Annotated[
        int, typer.Option(metavar="N", min=1, max=64, help="Broker processes, if not 1.")
    ] = 1,
    projections: Annotated[
        int, typer.Option(metavar="N", min=1, max=64, help="Projection processes, if not 1.")
    ] = 1,
    no_restart: Annotated[
        bool, typer.Option("--no-restart", help="Let what dies stay dead.")
    ] = False,
) -> None:
    """Run the whole system here until Ctrl-C; the data stay, also after a kill -9."""
    context.obj = data_dir
    if context.invoked_subcommand is not None:
        return
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.develop import serve
    from noetl_cli.stack.data_dir import default_data_dir
    from noetl_cli.stack.supervisor import StackOptions

    options = StackOptions(
        data_dir=data_dir or default_data_dir(),
        port=port,
        postgres_dsn=postgres,
        nats_url=nats,
        workers=workers,
        # Several of one service do not fit into one process.
        is_separate=processes or brokers > 1 or projections > 1,
        brokers=brokers,
        projections=projections,
        restarts=not no_restart,
    )
    try:
        run_until_signal(serve(options))
    except Interrupted:
        say("stopped")


@app.command("ps")
def list_parts(
    context: typer.Context, data_dir: DataDirOption = None, as_json: Json = False
) -> None:
    """List the parts of a running system: their process ids, and where their metrics are."""
    from noetl_cli.stack.processes import is_alive

    state = _running(data_dir or context.obj)
    parts = [part for part in state.parts if is_alive(part)]
    print_answer(
        [
            {"name": part.name, "pid": part.pid, "metrics": state.metrics.get(part.name)}
            for part in parts
        ],
        as_json=as_json,
        text=lambda: "\n".join(
            f"{part.pid:>8}  {part.name:<14}  {state.metrics.get(part.name, '')}".rstrip()
            for part in parts
        ),
    )


@app.command("info")
def show_info(
    context: typer.Context, data_dir: DataDirOption = None, as_json: Json = False
) -> None:
    """Say where a running system listens and keeps its data."""
    state = _running(data_dir or context.obj)
    places = {
        "url": state.url,
        "dsn": state.dsn,
        "nats_url": state.nats_url,
        "data_dir": state.data_dir,
    }
    print_answer(
        places,
        as_json=as_json,
        text=lambda: "\n".join(f"{name:<9} {value}" for name, value in places.items()),
    )


def _running(named: Path | None) -> "StackState":
    from noetl_cli.stack.data_dir import DataDir, default_data_dir
    from noetl_cli.stack.state import read_running

    data_dir = DataDir(named or default_data_dir())
    state = read_running(data_dir)
    if state is None:
        raise CommandFailed(
            f"no `noetl dev` runs in {data_dir.root}: start it, or name its --data-dir."
        )
    return state
