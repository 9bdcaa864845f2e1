"""validate, register, schema."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from pathlib import Path
from typing import Annotated

import typer

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.terminal import say


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Playbooks to check.")],
) -> None:
    """Check playbooks without running anything; every problem with its file, line and column."""
    from noetl_cli.validation import read_playbook

    invalid = 0
    for file in files:
        try:
            checked = read_playbook(file)
        except CommandFailed as failure:
            invalid += 1
            say(str(failure))
            continue
        for warning in checked.warnings:
            say(warning)
        typer.echo(f"{file}: valid")
    if invalid:
        raise typer.Exit(EXIT_USAGE)


def register(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The playbook.")],
) -> None:
    """Put a playbook into the catalog; unchanged content keeps its version."""
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.registration import register_file

    typer.echo(run_until_signal(register_file(file)))


def schema() -> None:
    """Print the JSON Schema of playbooks, with which editors complete and check them."""
    import msgspec

    from noetl_core.domain.json_schema import playbook_schema

    encoded = msgspec.json.encode(playbook_schema())
    typer.echo(msgspec.json.format(encoded, indent=2).decode())
