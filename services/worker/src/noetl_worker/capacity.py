"""How much of this worker is in use: what its heartbeat in noetl.runtime says beside that it lives.

Plain numbers that are there anyway; nothing is counted for this.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from noetl_worker.held import Held
from noetl_worker.metrics import TALLY
from noetl_worker.tool_slots import ToolSlots
from noetl_worker.work import Work


class ToolPool(Protocol):
    """What runs only so many calls at a time, however many slots the worker has."""

    @property
    def size(self) -> int: ...

    @property
    def busy(self) -> int: ...


def capacity_report(
    work: Work, held: Held, *, slots: int, tools: Mapping[str, ToolPool], limits: ToolSlots
) -> dict[str, Any]:
    """`free` may be less than the slots that are left: see Work.free_slots."""
    return {
        "slots": slots,
        "running": held.running,
        "free": max(0, work.free_slots()),
        "unconfirmed": held.unconfirmed,
        "done": TALLY.done,
        "failed": TALLY.failed,
        "tools": {kind: _tool(pool) for kind, pool in tools.items()} | limits.standing(),
    }


def _tool(pool: ToolPool) -> dict[str, int]:
    # More may be under way than run: the rest waits for a place.
    return {"slots": pool.size, "free": max(0, pool.size - pool.busy)}
