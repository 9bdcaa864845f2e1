"""Credentials through the gateway: what the user gives, and what may be shown of it."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.target import running_target
from noetl_cli.terminal import print_answer


async def store_credential(name: str, *, kind: str, data: str) -> None:
    fields = read_fields(data)
    async with running_target() as target:
        await target.gateway.set_credential(name, kind=kind, data=fields)


async def print_credentials(*, as_json: bool) -> None:
    async with running_target() as target:
        items = await target.gateway.credentials()
    print_answer(
        items,
        as_json=as_json,
        text=lambda: "\n".join(f"{item.name}  ({item.type})" for item in items) or "none",
    )


async def remove_credential(name: str) -> None:
    async with running_target() as target:
        await target.gateway.delete_credential(name)


def read_fields(source: str) -> dict[str, Any]:
    """From the argument, from `@file`, or from stdin with `-`. The value is never repeated."""
    try:
        return msgspec.json.decode(_text(source), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise CommandFailed(
            '--data must be one JSON object, such as {"dsn": "postgresql://..."}: '
            f"{type(error).__name__}.",
            exit_code=EXIT_USAGE,
        ) from None


def _text(source: str) -> str:
    if source == "-":
        return sys.stdin.read()
    if not source.startswith("@"):
        return source
    try:
        return Path(source[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandFailed(
            f"cannot read {source[1:]}: {error.strerror}.", exit_code=EXIT_USAGE
        ) from error
