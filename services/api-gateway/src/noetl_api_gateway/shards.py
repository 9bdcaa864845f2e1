"""Who owns which shard, and the wish for another number of them."""

from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import RequestError, json_body
from noetl_core.store import resize, topology
from noetl_core.wire import http
from noetl_core.wire.subjects import RESIZE_WISHED


async def show(gateway: Gateway, _request: Request) -> Response:
    return answer(200, await _view(gateway))


async def wish(gateway: Gateway, request: Request) -> Response:
    """Store the wish; the shard-manager grants it, whether it runs now or later."""
    asked = await json_body(request, http.ResizeRequest)
    if asked.shards_from == asked.shards_to:
        raise RequestError(422, f"there would be {asked.shards_to} shards as before", field="to")
    await resize.request(
        gateway.pool, gateway.mint(), shards_from=asked.shards_from, shards_to=asked.shards_to
    )
    await gateway.bus.wake(RESIZE_WISHED)
    return answer(202, await _view(gateway))


async def _view(gateway: Gateway) -> http.ShardsView:
    last = await resize.newest(gateway.pool)
    generation = await resize.current(gateway.pool)
    return http.ShardsView(
        count=generation.shard_count,
        resize=None if last is None else _resize(last),
        shards=[http.ShardView(**row) for row in await topology.standing(gateway.pool)],
    )


def _resize(last: resize.Resize) -> http.ResizeView:
    return http.ResizeView(
        shards_from=last.shards_from,
        shards_to=last.shards_to,
        requested_at=last.requested_at,
        switched_at=last.switched_at,
        drained_at=last.drained_at,
        refused=last.refused,
    )


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/api/shards",
        tag="shards",
        summary="Every shard with its owner, its lease and how far it is behind",
        handle=show,
        answers={200: http.ShardsView},
    ),
    Endpoint(
        method="POST",
        path="/api/shards/resize",
        tag="shards",
        summary="Change the number of shards while everything runs",
        handle=wish,
        body=http.ResizeRequest,
        answers={202: http.ShardsView},
        problems=(400, 409, 413, 415, 422),
    ),
)
