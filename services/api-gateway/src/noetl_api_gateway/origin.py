"""What a rerun or a fork takes from the execution it comes from: the payload, the state then."""

from typing import Any

from noetl_api_gateway.endpoint import Gateway
from noetl_api_gateway.promises import stored
from noetl_core.blob import ReferenceNotAvailableError
from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import ConflictError
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import EventId, ExecutionId, RefId
from noetl_core.domain.merge import deep_merge
from noetl_core.domain.state import ExecutionState
from noetl_core.store import event
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Stored

PAGE_SIZE = 1000


async def payload_of(
    gateway: Gateway, execution_id: ExecutionId, started_as: EventId, *, over: dict[str, Any]
) -> Stored | None:
    """The payload of an execution as it was stored, with `over` on top."""
    ref_id = RefId(started_as)
    rows = await gateway.results.history.find(gateway.pool, execution_id, [ref_id])
    row = rows.get(ref_id)
    if row is None:
        return stored(over, field="payload") if over else None
    if not over and row.sha256 is not None:
        return Stored(
            tier=row.tier,
            size=row.size,
            sha256=row.sha256,
            inline=row.inline,
            uri=row.uri,
            media_type=row.media_type,
        )
    reference = Reference(ref_id=ref_id, type="db" if row.inline is not None else "object_store")
    try:
        before = await gateway.results.get(gateway.pool, execution_id, reference)
    except ReferenceNotAvailableError as error:
        raise ConflictError(f"the payload of execution {execution_id} is gone: {error}") from error
    return stored(deep_merge(before, over), field="payload")


async def state_at(pool: Pool, execution_id: ExecutionId, moment: EventId) -> ExecutionState:
    """What was true of an execution just after an event of it."""
    state = ExecutionState(execution_id=execution_id)
    while page := await event.read_between(
        pool, execution_id, after=state.last_event_id, before=EventId(moment + 1), limit=PAGE_SIZE
    ):
        for one in page:
            state = fold(state, one)
    return state
