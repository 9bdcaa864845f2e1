"""Tools by kind: ours, and those that other packages register under `noetl.tools`.

The kind of another package's tool has a dot in it, `acme.mailer`: a playbook may name it without
the catalog knowing it, and it can never be one of ours.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import entry_points

import structlog

from noetl_core.domain.tools import is_plugin_kind
from noetl_worker.tools.tool import Tool

ENTRY_POINT_GROUP = "noetl.tools"

log = structlog.get_logger()


class Registry:
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.kind: tool for tool in tools}

    def find(self, kind: str) -> Tool | None:
        return self._tools.get(kind)

    @property
    def kinds(self) -> list[str]:
        return sorted(self._tools)

    async def close(self) -> None:
        for tool in self._tools.values():
            await tool.close()


def with_plugins(built_in: Sequence[Tool]) -> Registry:
    """Ours, and of other packages those whose kinds a playbook can name."""
    tools = {tool.kind: tool for tool in built_in}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        tool: Tool = point.load()()
        if tool.kind in tools or not is_plugin_kind(tool.kind):
            log.warning("tool.refused", kind=tool.kind, entry_point=point.value)
        else:
            tools[tool.kind] = tool
    return Registry(list(tools.values()))


@asynccontextmanager
async def closing(registry: Registry) -> AsyncIterator[Registry]:
    try:
        yield registry
    finally:
        await registry.close()
