"""`playbook`: runs another playbook as a child execution and waits for its end without a worker.

All that is done here is to find out which playbook, in which version, with which payload. The
broker starts the child in the commit that records that we wait for it. The version is settled here:
`latest` is the newest when the command is performed.
"""

from typing import Any

from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import StepName
from noetl_core.domain.reader import suggestion
from noetl_core.store import catalog
from noetl_core.store.catalog import CatalogEntry
from noetl_core.store.postgres import Pool
from noetl_worker.patience import patiently
from noetl_worker.plan import Plans
from noetl_worker.tools.tool import ToolCall, ToolFailedError, ToolParked, wrong_field
from noetl_worker.tools.wait import after

NEWEST = "latest"


class PlaybookTool:
    kind = "playbook"

    def __init__(self, pool: Pool, plans: Plans) -> None:
        self._pool = pool
        self._plans = plans

    async def run(self, call: ToolCall) -> ToolParked:
        entry = await self._find(_path(call.config.get("path")), _version(call))
        return ToolParked(
            catalog_id=entry.catalog_id,
            path=entry.path,
            version=entry.version,
            payload=call.input,
            return_step=await self._return_step(entry, call.config.get("return_step")),
            until_ms=None if call.timeout_s is None else after(call.timeout_s),
        )

    async def close(self) -> None:
        pass

    async def _find(self, path: str, version: int | None) -> CatalogEntry:
        entry = await patiently(lambda: catalog.find(self._pool, path, version=version))
        if entry is not None:
            return entry
        which = f"playbook {path!r}" if version is None else f"version {version} of {path!r}"
        message = f"the catalog has no {which}: register it with `noetl register FILE`"
        raise ToolFailedError(ToolError(kind="not_found", code="NO_PLAYBOOK", message=message))

    async def _return_step(self, entry: CatalogEntry, name: Any) -> StepName | None:
        if name is None or name == "":
            return None
        steps = await patiently(lambda: self._plans.steps_of(entry.catalog_id))
        if name in steps:
            return StepName(name)
        problem = f"names no step of {entry.path!r}: {name!r}; {suggestion(str(name), steps)}"
        raise wrong_field("return_step", problem)


def _path(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise wrong_field("path", "must be the path of a playbook in the catalog")


def _version(call: ToolCall) -> int | None:
    value = call.config.get("version")
    if value is None or value == NEWEST:
        return None
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        raise wrong_field("version", f"must be a number or `{NEWEST}`, not {value!r}")
    return int(text)
