"""noetl.execution as clients read it. Its only writer is the projection (execution_projection.py).

The projection follows the log, so for a moment an accepted execution has no row yet. `accepted`
finds it where it is in that moment: it is asked only after a miss.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from noetl_core.domain.errors import RetryableError
from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.state import ExecutionState
from noetl_core.store.postgres import Connection, Pool

if TYPE_CHECKING:
    from asyncpg import Record

_COLUMNS = """
execution_id, catalog_id, path, version, status, progress, waiting_on, last_event_type,
last_node_name, last_projected_event_id, parent_execution_id, error, started_at, updated_at,
ended_at
"""

_READ = f"SELECT {_COLUMNS} FROM noetl.execution WHERE execution_id = $1"  # noqa: S608 - a constant


async def read(conn: Connection | Pool, execution_id: ExecutionId) -> "Record | None":
    """One row by its primary key; JSON columns as text."""
    return await conn.fetchrow(_READ, execution_id)


class StateUnreadableError(RetryableError):
    """What stands in a row is no state. The projection or its auditor makes it anew."""

    def __init__(self, *, execution_id: ExecutionId) -> None:
        super().__init__(
            f"the status row of execution {execution_id} is broken. It is made anew when something "
            f"happens to it, or by `noetl db rebuild-projection --execution {execution_id}`"
        )


_READ_STATE = "SELECT state FROM noetl.execution WHERE execution_id = $1"

_decode_state = msgspec.json.Decoder(ExecutionState).decode


async def read_state(conn: Connection | Pool, execution_id: ExecutionId) -> ExecutionState | None:
    """The folded state. Raises StateUnreadableError."""
    state = await conn.fetchval(_READ_STATE, execution_id)
    try:
        return None if state is None else _decode_state(state)
    except msgspec.DecodeError:
        raise StateUnreadableError(execution_id=execution_id) from None


class Accepted(NamedTuple):
    """An execution without a row. `body` is set when the log does not know it either."""

    found_in: Literal["log", "inbox", "dead_letter"]
    catalog_id: int | None
    path: str | None
    version: int | None
    body: bytes | None
    reason: str | None
    accepted_at: datetime


# The broker deletes the inbox row in the commit that appends the first event, so one statement,
# which sees one moment, always finds one of the two.
_ACCEPTED = """
(SELECT 'log', event.catalog_id, path, version, NULL::bytea, NULL::text, event.created_at
 FROM noetl.event LEFT JOIN noetl.catalog USING (catalog_id)
 WHERE execution_id = $1 AND event_key = 'start')
UNION ALL
(SELECT 'inbox', NULL, NULL, NULL, body, NULL, created_at
 FROM noetl.inbox WHERE execution_id = $1 ORDER BY inbox_id LIMIT 1)
UNION ALL
(SELECT 'dead_letter', NULL, NULL, NULL, body, reason, created_at
 FROM noetl.dead_letter WHERE execution_id = $1 ORDER BY dead_letter_id LIMIT 1)
LIMIT 1
"""


async def accepted(conn: Connection | Pool, execution_id: ExecutionId) -> Accepted | None:
    """The same question after a miss: was it promised, and how far has it come?"""
    row = await conn.fetchrow(_ACCEPTED, execution_id)
    return None if row is None else Accepted(*row)


class Cursor(NamedTuple):
    """The last row of a page; the next page starts behind it."""

    started_at: datetime
    execution_id: ExecutionId


FROM_THE_NEWEST = Cursor(datetime.max.replace(tzinfo=UTC), ExecutionId(2**63 - 1))


def _list_query(*filters: str) -> str:
    conditions = "".join(f" AND {name} = ${number}" for number, name in enumerate(filters, start=4))
    return f"""
    SELECT {_COLUMNS} FROM noetl.execution
    WHERE (started_at, execution_id) < ($1, $2){conditions}
    ORDER BY started_at DESC, execution_id DESC
    LIMIT $3
    """  # noqa: S608 - column names of this module


# A text per set of filters: `$4 IS NULL OR path = $4` would hide the index on path from the plan.
_LISTS = {
    (): _list_query(),
    ("status",): _list_query("status"),
    ("path",): _list_query("path"),
    ("status", "path"): _list_query("status", "path"),
}


async def newest(
    conn: Connection | Pool,
    *,
    status: str | None = None,
    path: str | None = None,
    before: Cursor = FROM_THE_NEWEST,
    limit: int,
) -> "list[Record]":
    """Executions from the newest to the oldest, past `before`."""
    filters = {"status": status, "path": path}
    given = {name: value for name, value in filters.items() if value is not None}
    query = _LISTS[tuple(given)]
    return list(await conn.fetch(query, *before, limit, *given.values()))


_CHILDREN = f"""
SELECT {_COLUMNS} FROM noetl.execution
WHERE parent_execution_id = $1 AND execution_id > $2
ORDER BY execution_id
LIMIT $3
"""  # noqa: S608 - a constant


async def children(
    conn: Connection | Pool, execution_id: ExecutionId, *, after: ExecutionId, limit: int
) -> "list[Record]":
    """The executions that steps of this one have started, in order, past `after`."""
    return list(await conn.fetch(_CHILDREN, execution_id, after, limit))


_ENDED_AMONG = """
SELECT execution_id FROM noetl.execution
WHERE execution_id = ANY ($1::bigint[]) AND status IN ('COMPLETED', 'FAILED', 'CANCELLED')
"""


async def ended_among(
    conn: Connection | Pool, execution_ids: Sequence[ExecutionId]
) -> list[ExecutionId]:
    """Those of the given executions that have come to their end."""
    rows = await conn.fetch(_ENDED_AMONG, execution_ids)
    return [ExecutionId(row["execution_id"]) for row in rows]
