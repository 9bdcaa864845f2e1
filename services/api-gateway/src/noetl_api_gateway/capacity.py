"""How much of each worker is in use, and of the workers of a pool together."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from noetl_core.domain.workers import POOL_LABEL, TOOL_SLOTS_LABEL
from noetl_core.wire import http

if TYPE_CHECKING:
    from asyncpg import Record

_POOL_NAME = "pool_name"
_NOT_OF_THE_WORKER = frozenset({POOL_LABEL, _POOL_NAME, TOOL_SLOTS_LABEL})
"""Labels that are shown as something else."""


def worker_view(row: "Record") -> http.WorkerView:
    said: dict[str, Any] = _json(row["runtime"]) or {}
    labels = _labels(_json(row["labels"]))
    in_use = _in_use(row["capacity"], said)
    return http.WorkerView(
        name=row["name"],
        kind=row["kind"],
        status=row["status"],
        uri=row["uri"],
        pools=_pools(labels, said),
        pool_name=_text(labels.get(_POOL_NAME)),
        labels={name: value for name, value in labels.items() if name not in _NOT_OF_THE_WORKER},
        slots=in_use.slots,
        running=in_use.running,
        free=in_use.free,
        tools=said.get("tools") or {},
        capabilities=_json(row["capabilities"]) or [],
        hostname=said.get("hostname"),
        pid=said.get("pid"),
        heartbeat_age_seconds=row["heartbeat_age_seconds"],
    )


def pools_of(workers: Iterable[http.WorkerView]) -> list[http.PoolView]:
    by_pool: dict[tuple[str, str], list[http.WorkerView]] = {}
    for worker in workers:
        for pool in worker.pools:
            name = worker.pool_name or worker.name
            by_pool.setdefault((pool, name), []).append(worker)
    return [_pool_view(pool, name, members) for (pool, name), members in sorted(by_pool.items())]


def labels_shown(text: str | None) -> Any:
    """As they were said, without what only the broker reads."""
    said = _json(text)
    if isinstance(said, dict):
        said.pop(TOOL_SLOTS_LABEL, None)
    return said


class _InUse(NamedTuple):
    slots: int | None
    running: int | None
    free: int | None


def _in_use(capacity: int | None, said: dict[str, Any]) -> _InUse:
    """What a worker leaves out follows from the rest. One of ours says all three of it."""
    running: int | None = said.get("running")
    free: int | None = said.get("free")
    if "slots" in said or (running is None and free is None):
        return _InUse(capacity, running, free)
    if capacity is None and (running is None or free is None):
        return _InUse(None, running, free)
    # Who is registered with less has grown since, and did not say so.
    slots = max(capacity or 0, (running or 0) + (free or 0))
    if running is None:
        running = slots - (free or 0)
    return _InUse(slots, running, slots - running if free is None else free)


def _text(said: Any) -> str | None:
    """Whoever registers over HTTP may have called it 5."""
    return None if said is None else str(said)


def _pools(labels: dict[str, Any], said: dict[str, Any]) -> list[str]:
    """Of a worker of ours in its label, of another system's in what it said."""
    if POOL_LABEL in labels:
        return str(labels[POOL_LABEL]).split(",")
    return [str(said["type"])] if said.get("type") else []


def _labels(labels: Any) -> dict[str, Any]:
    if isinstance(labels, list):
        return dict.fromkeys(map(str, labels), "true")
    return labels if isinstance(labels, dict) else {}


def _pool_view(runtime: str, name: str, workers: list[http.WorkerView]) -> http.PoolView:
    ready = [worker for worker in workers if worker.status == "ready"]
    draining = [worker for worker in workers if worker.status == "draining"]
    last_heard_of = min(ready or draining or workers, key=lambda w: w.heartbeat_age_seconds)
    return http.PoolView(
        name=name,
        runtime=runtime,
        status="ready" if ready else "draining" if draining else "offline",
        uri=last_heard_of.uri,
        labels=_in_common([worker.labels for worker in ready or draining or workers]),
        workers=len(ready),
        draining=len(draining),
        capacity=sum(worker.slots or 0 for worker in ready),
        running=sum(worker.running or 0 for worker in (*ready, *draining)),
        free=sum(worker.free or 0 for worker in ready),
        tools=_tools(ready),
        members=[worker.name for worker in workers],
        heartbeat_age_seconds=min(worker.heartbeat_age_seconds for worker in workers),
    )


def _in_common(labels: list[dict[str, Any]]) -> dict[str, Any]:
    first, *others = labels
    return {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }


def _tools(workers: list[http.WorkerView]) -> dict[str, http.ToolCapacity]:
    said: dict[str, list[http.ToolCapacity]] = {}
    for worker in workers:
        for kind, capacity in worker.tools.items():
            said.setdefault(kind, []).append(_tool(capacity))
    return {kind: _together(said[kind]) for kind in sorted(said)}


def _tool(said: Any) -> http.ToolCapacity:
    """A worker of ours says both; of one that says a number it is what is free."""
    if not isinstance(said, dict):
        return http.ToolCapacity(free=_count(said))
    return http.ToolCapacity(slots=_count(said.get("slots")), free=_count(said.get("free")))


def _together(tools: list[http.ToolCapacity]) -> http.ToolCapacity:
    return http.ToolCapacity(
        slots=_sum([tool.slots for tool in tools]), free=_sum([tool.free for tool in tools])
    )


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _count(said: Any) -> int | None:
    """Whoever reports over HTTP may have written anything."""
    is_count = isinstance(said, int) and not isinstance(said, bool)
    return said if is_count and 0 <= said <= http.CAPACITY_MAX else None


def _json(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)
