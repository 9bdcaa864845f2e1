"""One step of a playbook, performed with scripted tools against a real Postgres."""

from typing import Any

from noetl_core.blob import ResultStore, document_of
from noetl_core.domain.brief import Brief, encode_brief
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import CatalogId, CommandId, ShardId, StepName, WorkerId
from noetl_core.process.secrets import load_keyring
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, Failed, Parked
from noetl_worker.credentials import Credentials
from noetl_worker.perform import Performer, Sink
from noetl_worker.plan import Plans
from noetl_worker.tools.registry import Registry
from noetl_worker.tools.tool import Tool, ToolCall, ToolParked, ToolResult
from services.worker.desk import EXECUTION, playbook, register


class ScriptedTool:
    """Answers with the given results in turn, then with its input; keeps its calls."""

    def __init__(self, kind: str, *results: Any) -> None:
        self.kind = kind
        self.calls: list[ToolCall] = []
        self._results = list(results)

    async def run(self, call: ToolCall) -> ToolResult | ToolParked:
        self.calls.append(call)
        result = self._results.pop(0) if self._results else dict(call.input) or None
        if isinstance(result, BaseException):
            raise result
        return result if isinstance(result, ToolResult | ToolParked) else ToolResult(result)

    async def close(self) -> None:
        pass


class Bench:
    """Performs one step of a playbook with scripted tools."""

    def __init__(self, pool: Pool, key: str) -> None:
        self.pool = pool
        self.keyring = load_keyring(key)
        self.tools: dict[str, Tool] = {
            kind: ScriptedTool(kind) for kind in ("noop", "http", "postgres")
        }
        self.results = ResultStore()
        self.sink: Sink | None = None

    def answers(self, *results: Any, kind: str = "noop") -> ScriptedTool:
        tool = self.tools[kind] = ScriptedTool(kind, *results)
        return tool

    async def run(self, text: str, step: str = "a", **brief: Any) -> Done | Failed | Parked:
        await self.pool.execute("DELETE FROM noetl.catalog WHERE catalog_id = 1")
        await register(self.pool, playbook(text))
        return await self.performer().perform(leased_of(step, **brief))

    def performer(self) -> Performer:
        return Performer(
            self.pool,
            worker_id=WorkerId("w"),
            plans=Plans(self.pool),
            results=self.results,
            tools=Registry(list(self.tools.values())),
            credentials=Credentials(self.pool, self.keyring),
            sink=self.sink,
        )

    async def value(self, text: str, **brief: Any) -> Any:
        end = await self.run(text, **brief)
        assert isinstance(end, Done), end
        return None if end.stored is None else document_of(end.stored)

    async def parked(self, text: str, **brief: Any) -> Parked:
        end = await self.run(text, **brief)
        assert isinstance(end, Parked), end
        return end

    async def error(self, text: str, **brief: Any) -> ToolError:
        end = await self.run(text, **brief)
        assert isinstance(end, Failed), end
        return end.error


def leased_of(step: str, **fields: Any) -> Leased:
    brief = Brief(catalog_id=CatalogId(1), step=StepName(step), visit=1, attempt=1, **fields)
    return Leased(
        EXECUTION,
        CommandId(f"{step}.1#1"),
        ShardId(0),
        StepName(step),
        1,
        "cpu",
        encode_brief(brief),
    )
