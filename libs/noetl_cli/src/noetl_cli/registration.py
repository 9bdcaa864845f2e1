"""Puts a playbook file into the catalog."""

from pathlib import Path

from noetl_cli.target import running_target
from noetl_cli.validation import read_playbook


async def register_file(file: Path) -> str:
    content = read_playbook(file).content
    async with running_target() as target:
        registered = await target.gateway.register(content, file=str(file))
    news = "registered" if registered.created else "unchanged"
    return f"{registered.path} version {registered.version} ({news})"
