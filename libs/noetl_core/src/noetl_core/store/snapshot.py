"""The state in noetl.execution: where the fold of an execution can start from."""

import msgspec
import structlog

from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.state import ExecutionState
from noetl_core.store.postgres import Connection

_READ = "SELECT execution_id, state FROM noetl.execution WHERE execution_id = ANY ($1::bigint[])"

_decode = msgspec.json.Decoder(ExecutionState).decode

log = structlog.get_logger()


async def read(
    conn: Connection, execution_ids: list[ExecutionId]
) -> dict[ExecutionId, ExecutionState]:
    """The states the projection has written. An execution that it has not met is left out, and one
    whose state cannot be read: the log tells all of it."""
    states: dict[ExecutionId, ExecutionState] = {}
    for execution_id, text in await conn.fetch(_READ, execution_ids):
        try:
            states[execution_id] = _decode(text)
        except msgspec.DecodeError as error:
            log.warning("snapshot.unreadable", execution_id=execution_id, reason=str(error))
    return states
