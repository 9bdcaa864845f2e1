"""version."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

import typer


def version() -> None:
    """Say which version this is."""
    from importlib.metadata import version as installed_version

    typer.echo(f"noetl {installed_version('noetl-cli')}")
