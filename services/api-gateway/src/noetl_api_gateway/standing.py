"""What executions wait for now, over what their rows said when something last happened."""

from collections.abc import Sequence

import msgspec

from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.waiting import waits_for
from noetl_core.store import waiting
from noetl_core.store.postgres import Pool
from noetl_core.store.waiting import Situation
from noetl_core.wire import http

_NOTHING = Situation([])
_MOVING = frozenset({"PENDING", "RUNNING"})


async def at_this_moment(
    pool: Pool, views: Sequence[http.ExecutionView]
) -> list[http.ExecutionView]:
    """The same with `waiting_on` as the queue and the workers have it now."""
    moving = [ExecutionId(int(view.execution_id)) for view in views if view.status in _MOVING]
    found = await waiting.situations(pool, moving)
    return [as_it_stands(v, found.get(ExecutionId(int(v.execution_id)), _NOTHING)) for v in views]


def as_it_stands(view: http.ExecutionView, situation: Situation) -> http.ExecutionView:
    if view.status not in _MOVING or situation == _NOTHING:
        return view
    sentence = waits_for(
        view.waiting_on,
        situation.groups,
        flag=situation.flag,
        has_broker=situation.has_broker,
    )
    return msgspec.structs.replace(view, waiting_on=sentence)
