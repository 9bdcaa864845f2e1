"""API keys, made in the database itself: whoever has it may let others in."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.terminal import print_answer
from noetl_core.domain.roles import ROLES, Role
from noetl_core.store import api_key, audit
from noetl_core.store.api_key import ApiKey
from noetl_core.store.postgres import Pool, open_pool

PREFIX = "noetl_"
"""So that a key that lies around somewhere is known for what it is."""

_ACTOR = "cli"


async def create_key(dsn: str, name: str, *, role: str, days: int | None) -> str:
    """The key. It is nowhere else, and cannot be shown again."""
    key = PREFIX + secrets.token_urlsafe(32)
    async with _database(dsn) as pool, pool.acquire() as conn, conn.transaction():
        made = await api_key.create(
            conn,
            key_id=secrets.token_hex(4),
            sha256=api_key.digest_of(key),
            name=name,
            role=_role(role),
            days=days,
        )
        if made is None:
            detail = f"there is a key `{name}`: revoke it first (`noetl api-key revoke {name}`)"
            raise CommandFailed(detail, exit_code=EXIT_USAGE)
        details = {"key_id": made.key_id, "role": made.role}
        await audit.record(
            conn, actor=_ACTOR, action="api_key.created", subject=name, details=details
        )
    return key


async def print_keys(dsn: str, *, as_json: bool) -> None:
    async with _database(dsn) as pool:
        keys = await api_key.list_all(pool)
    print_answer(
        [_shown(one) for one in keys],
        as_json=as_json,
        text=lambda: "\n".join(map(_line, keys)) or "none",
    )


async def revoke_key(dsn: str, name: str) -> None:
    async with _database(dsn) as pool, pool.acquire() as conn, conn.transaction():
        if not await api_key.revoke(conn, name):
            raise CommandFailed(f"there is no key `{name}` to revoke", exit_code=EXIT_USAGE)
        await audit.record(conn, actor=_ACTOR, action="api_key.revoked", subject=name)


def _role(text: str) -> Role:
    for role in ROLES:
        if role == text:
            return role
    raise CommandFailed(f"--role is one of {', '.join(ROLES)}.", exit_code=EXIT_USAGE)


def _shown(one: ApiKey) -> dict[str, Any]:
    return {**one._asdict(), "state": _state(one)}


def _line(one: ApiKey) -> str:
    return f"{one.name}  ({one.role}, {one.key_id}, {_state(one)})"


def _state(one: ApiKey) -> str:
    if one.revoked_at is not None:
        return "revoked"
    is_over = one.expires_at is not None and one.expires_at <= datetime.now(UTC)
    return "expired" if is_over else "valid"


@asynccontextmanager
async def _database(dsn: str) -> AsyncIterator[Pool]:
    try:
        async with open_pool(dsn, role="", size_max=1) as pool:
            yield pool
    except (OSError, asyncpg.PostgresError, ValueError) as error:
        raise CommandFailed(f"the database refused: {error}") from error
