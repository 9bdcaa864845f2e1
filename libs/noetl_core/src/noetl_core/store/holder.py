"""Who holds the commands that somebody reports on, and how it stands with their leases."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from noetl_core.domain.ids import CommandId, ExecutionId, WorkerId
from noetl_core.store.postgres import Connection

Key: TypeAlias = tuple[ExecutionId, CommandId]

_HOLDERS = """
SELECT c.execution_id, c.command_id, c.worker_id
FROM noetl.command c
JOIN unnest($1::bigint[], $2::text[]) AS wanted (execution_id, command_id)
    ON c.execution_id = ANY (ARRAY[wanted.execution_id])
    AND c.command_id = ANY (ARRAY[wanted.command_id])
"""


async def holders(conn: Connection, commands: list[Key]) -> dict[Key, WorkerId | None]:
    """Who holds each of these commands; one without a row is left out."""
    rows = await conn.fetch(_HOLDERS, *_columns(commands))
    return {(row["execution_id"], row["command_id"]): row["worker_id"] for row in rows}


class Standing(NamedTuple):
    """How it stands with the lease of a command."""

    is_over: bool
    given_back_by: WorkerId | None
    """The worker, if it has let go of it by itself."""


_STANDINGS = """
SELECT c.execution_id, c.command_id, c.status = 'leased' AND c.lease_until < now(),
       CASE WHEN c.given_back THEN c.worker_id END
FROM noetl.command c
JOIN unnest($1::bigint[], $2::text[]) AS wanted (execution_id, command_id)
    ON c.execution_id = ANY (ARRAY[wanted.execution_id])
    AND c.command_id = ANY (ARRAY[wanted.command_id])
"""


async def standings(conn: Connection, commands: list[Key]) -> dict[Key, Standing]:
    """How it stands with these leases at this moment; a command without a row is left out."""
    rows = await conn.fetch(_STANDINGS, *_columns(commands))
    return {(row[0], row[1]): Standing(row[2], row[3]) for row in rows}


_ENDED_BY_OTHERS = """
SELECT u.execution_id, u.command_id, u.worker_id
FROM unnest($1::bigint[], $2::text[], $3::text[]) AS u (execution_id, command_id, worker_id)
JOIN noetl.event AS e
    ON e.execution_id = u.execution_id AND e.event_key = 'end:' || u.command_id
WHERE e.meta ->> 'worker_id' IS DISTINCT FROM u.worker_id
"""


async def ended_by_others(
    conn: Connection, ends: Sequence[tuple[ExecutionId, CommandId, WorkerId]]
) -> list[tuple[ExecutionId, CommandId, WorkerId]]:
    """Of these ends, those of commands that have ended otherwise: an expired lease, say."""
    rows = await conn.fetch(_ENDED_BY_OTHERS, *zip(*ends, strict=True))
    return [(row[0], row[1], row[2]) for row in rows]


def _columns(commands: list[Key]) -> tuple[list[ExecutionId], list[CommandId]]:
    return [key[0] for key in commands], [key[1] for key in commands]
