"""cancel, pause, resume, retry, rerun, fork, signal, approve, deny."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noetl_cli.terminal import print_json, say

if TYPE_CHECKING:
    from noetl_cli.control import Act

ExecutionId = Annotated[str, typer.Argument(metavar="ID", help="The execution.")]
Reason = Annotated[str, typer.Option(help="Recorded in the log.")]
Wait = Annotated[
    bool, typer.Option("--wait", help="Follow it to its end, and exit as `noetl run` does.")
]
Timeout = Annotated[
    float | None, typer.Option(metavar="S", min=0, help="With --wait: give up after S seconds.")
]
Json = Annotated[bool, typer.Option("--json", help="With --wait: answer in JSON.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Put a value into the payload; a.b nests."),
]
Payload = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Goes over the old payload: JSON or YAML.")
]
SignalName = Annotated[str, typer.Argument(metavar="NAME", help="What the step waits for.")]
WaitingStep = Annotated[str, typer.Argument(metavar="STEP", help="The step that waits.")]
Data = Annotated[str, typer.Option(metavar="JSON", help="What the step gets as its result.")]
By = Annotated[str, typer.Option(metavar="NAME", help="Who says so.")]


def cancel(
    execution_id: ExecutionId,
    reason: Reason = "",
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Cancel an execution."""
    from noetl_cli.control import cancel

    said = "execution {} will be cancelled: noetl status {}"
    _do(cancel(execution_id, reason=reason), said, wait, timeout, as_json)


def pause(execution_id: ExecutionId, reason: Reason = "") -> None:
    """Begin nothing more of an execution until it is resumed; what runs comes to its end."""
    from noetl_cli.control import pause

    said = "execution {} is paused; let it go on with: noetl resume {}"
    _do(pause(execution_id, reason=reason), said)


def resume(
    execution_id: ExecutionId, wait: Wait = False, timeout: Timeout = None, as_json: Json = False
) -> None:
    """Let a paused execution go on."""
    from noetl_cli.control import resume

    _do(resume(execution_id), "execution {} goes on: noetl status {}", wait, timeout, as_json)


def retry(
    execution_id: ExecutionId,
    step: Annotated[
        str | None, typer.Option(metavar="STEP", help="From this step; default: what failed.")
    ] = None,
    all_items: Annotated[
        bool, typer.Option("--all-items", help="Loops run every item again, not only failed ones.")
    ] = False,
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Let an execution that has ended go on, from what failed or from a step."""
    from noetl_cli.control import retry

    act = retry(execution_id, step=step, all_items=all_items)
    _do(act, "execution {} goes on: noetl status {}", wait, timeout, as_json)


def rerun(
    execution_id: ExecutionId,
    assignments: Assignments = None,
    payload: Payload = None,
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Start the same version of the same playbook again, and print the id of the new execution."""
    from noetl_cli.control import rerun
    from noetl_cli.payload import build_payload

    act = rerun(execution_id, payload=build_payload(payload, assignments or []))
    _do(act, "execution {} is started: noetl status {}", wait, timeout, as_json)


def fork(
    execution_id: ExecutionId,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Where the new execution begins.")],
    assignments: Assignments = None,
    payload: Payload = None,
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Start a new execution at a step, with what was true when that was last entered."""
    from noetl_cli.control import fork
    from noetl_cli.payload import build_payload

    act = fork(execution_id, step=step, payload=build_payload(payload, assignments or []))
    _do(act, "execution {} is started: noetl status {}", wait, timeout, as_json)


def signal(
    execution_id: ExecutionId,
    name: SignalName,
    data: Data = "",
    deny: Annotated[bool, typer.Option("--deny", help="Fail the step that waits.")] = False,
    by: By = "",
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Tell an execution something that a step of it waits for."""
    _do(_signal(execution_id, name, data, by, approved=not deny), _TOLD, wait, timeout, as_json)


def approve(
    execution_id: ExecutionId,
    step: WaitingStep,
    data: Data = "",
    by: By = "",
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Approve what a step waits for an approval of."""
    # An approval waits for the signal that has the name of its step.
    _do(_signal(execution_id, step, data, by, approved=True), _TOLD, wait, timeout, as_json)


def deny(
    execution_id: ExecutionId,
    step: WaitingStep,
    data: Data = "",
    by: By = "",
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Deny what a step waits for an approval of: the step fails."""
    _do(_signal(execution_id, step, data, by, approved=False), _TOLD, wait, timeout, as_json)


_TOLD = "execution {} is told: noetl status {}"


def _signal(execution_id: str, name: str, data: str, by: str, *, approved: bool) -> "Act":
    from noetl_cli.control import signal
    from noetl_cli.payload import parse_value

    value = parse_value(data) if data else None
    return signal(execution_id, name=name, data=value, approved=approved, by=by)


def _do(
    act: "Act",
    said: str,
    wait: bool = False,
    timeout: float | None = None,
    as_json: bool = False,
) -> None:
    """The id goes to stdout, for scripts; with --wait what came out does, as of `noetl run`."""
    from rich.console import Console

    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.control import control
    from noetl_cli.summary import print_outcome

    console = Console(stderr=True)
    done = run_until_signal(control(act, is_followed=wait, seconds=timeout, console=console))
    outcome = done.outcome
    if outcome is None:
        say(said.format(done.execution_id, done.execution_id))
        typer.echo(done.execution_id)
        return
    if as_json:
        print_json(outcome.as_json())
    else:
        print_outcome(Console(), outcome)
    raise typer.Exit(outcome.exit_code)
