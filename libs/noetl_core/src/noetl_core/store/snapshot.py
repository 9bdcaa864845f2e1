"""The state in noetl.execution: where the fold of an execution can start from."""

import msgspec

from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.state import ExecutionState
from noetl_core.store.postgres import Connection

_READ = "SELECT state FROM noetl.execution WHERE execution_id = ANY ($1::bigint[])"

_decode = msgspec.json.Decoder(ExecutionState).decode


async def read(
    conn: Connection, execution_ids: list[ExecutionId]
) -> dict[ExecutionId, ExecutionState]:
    """The states the projection has written; an execution it has not met is left out."""
    rows = await conn.fetch(_READ, execution_ids)
    states = (_decode(row["state"]) for row in rows)
    return {state.execution_id: state for state in states}
