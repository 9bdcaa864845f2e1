"""version."""

from importlib.metadata import version as installed_version

import typer


def version() -> None:
    """Say which version this is."""
    typer.echo(f"noetl {installed_version('noetl-cli')}")
