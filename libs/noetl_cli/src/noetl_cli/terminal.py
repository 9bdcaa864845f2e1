"""The two ends of the terminal: answers go to stdout, everything else to stderr."""

import sys
from collections.abc import Callable
from typing import Any

import typer


def print_json(value: Any) -> None:
    """One JSON value, on one line."""
    import msgspec  # noqa: PLC0415 - `noetl --help` prints none

    typer.echo(msgspec.json.encode(value).decode())


def say(line: str) -> None:
    typer.echo(line, err=True)


def print_answer(value: Any, *, as_json: bool, text: Callable[[], str]) -> None:
    if as_json:
        print_json(value)
    else:
        typer.echo(text())
        sys.stdout.flush()
