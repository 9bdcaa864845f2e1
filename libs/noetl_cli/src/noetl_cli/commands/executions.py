"""run, executions, status, events, explain, workers."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from pathlib import Path
from typing import Annotated

import typer

from noetl_cli.terminal import print_json

ExecutionId = Annotated[str, typer.Argument(metavar="ID", help="The execution.")]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


def run(
    file_or_path: Annotated[
        str, typer.Argument(metavar="FILE_OR_PATH", help="A YAML file, or a path of the catalog.")
    ],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Put a value into the payload; a.b nests."),
    ] = None,
    payload: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The payload, a JSON or YAML object.")
    ] = None,
    as_json: Json = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Give up watching after S seconds.")
    ] = None,
) -> None:
    """Run a playbook to its end and show what came out.

    It runs on the NoETL at NOETL_URL, else on the running `noetl dev`, else on a temporary one.
    Exit code: 0 completed, 1 failed or cancelled, 2 invalid playbook or usage, 3 timeout.
    """
    from rich.console import Console

    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.execute import read_request
    from noetl_cli.execute import run as run_playbook
    from noetl_cli.payload import build_payload
    from noetl_cli.summary import print_outcome

    request = read_request(
        file_or_path, payload=build_payload(payload, assignments or []), timeout_seconds=timeout
    )
    outcome = run_until_signal(run_playbook(request, Console(stderr=True)))
    if as_json:
        print_json(outcome.as_json())
    else:
        print_outcome(Console(), outcome)
    raise typer.Exit(outcome.exit_code)


def list_newest(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    as_json: Json = False,
) -> None:
    """List the newest executions."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.inspect import list_executions

    run_until_signal(list_executions(limit=limit, as_json=as_json))


def status(execution_id: ExecutionId, as_json: Json = False) -> None:
    """Say how far an execution is, and what its steps returned."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.inspect import show_status

    run_until_signal(show_status(execution_id, as_json=as_json))


def events(execution_id: ExecutionId, as_json: Json = False) -> None:
    """List everything that happened to an execution, in order (with --json: one line an event)."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.inspect import list_events

    run_until_signal(list_events(execution_id, as_json=as_json))


def explain(execution_id: ExecutionId, as_json: Json = False) -> None:
    """Say in plain sentences what an execution waits for, since when, and what would move it."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.inspect import print_explanation

    run_until_signal(print_explanation(execution_id, as_json=as_json))


def workers(as_json: Json = False) -> None:
    """List the workers, and how much of each is in use."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.inspect import list_workers

    run_until_signal(list_workers(as_json=as_json))
