"""Read your writes: an answer that is not older than an event that the client knows of.

The status is a projection of the log and follows it by a moment. Whoever has seen an event (in
`/events`, in another answer's `last_event_id`) asks with `min_event_id` and gets nothing older.
"""

import asyncio
from collections.abc import Callable

from noetl_api_gateway.endpoint import Gateway
from noetl_core.domain.errors import RetryableError
from noetl_core.domain.ids import EventId, ExecutionId
from noetl_core.domain.sharding import shard_of
from noetl_core.store import projection_checkpoint, setting

SECONDS_DEFAULT = 5.0
_LOOK_SECONDS = (0.01, 0.02, 0.05, 0.1)
"""The first looks come soon, because the projection is rarely far behind."""


class NotShownError(RetryableError):
    """The projection has not come to the event in the time that the client gave it."""

    def __init__(self, *, event_id: EventId, execution_id: ExecutionId, seconds: float) -> None:
        super().__init__(
            f"the status of execution {execution_id} does not show event {event_id} after "
            f"{seconds:g} s: ask again, wait longer (`wait`), or read `/events`, which is the log"
        )


async def until_shown(
    gateway: Gateway, execution_id: ExecutionId, event_id: int, *, seconds: float | None
) -> None:
    """Return when the status shows the event. Raises NotShownError when the time is up."""
    if not event_id:
        return
    wanted = EventId(event_id)
    given = SECONDS_DEFAULT if seconds is None else seconds
    shard = shard_of(execution_id, shard_count=await setting.shard_count(gateway.pool))
    clock: Callable[[], float] = asyncio.get_running_loop().time
    deadline = clock() + given
    looks = 0
    while not await projection_checkpoint.shows(gateway.pool, execution_id, wanted, shard=shard):
        pause = _LOOK_SECONDS[min(looks, len(_LOOK_SECONDS) - 1)]
        looks += 1
        if clock() + pause > deadline:
            raise NotShownError(event_id=wanted, execution_id=execution_id, seconds=given)
        await asyncio.sleep(pause)
