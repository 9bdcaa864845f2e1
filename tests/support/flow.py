"""The playbooks of tests/fixtures run on real services, and the laws that every log keeps.

A test says what its playbook is for. `Flow.run` asserts for each of them what holds for all: what
is recorded once, what is left over, how much an iteration and a result may cost.
"""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

from chaos.stack import Stack

PLAYBOOKS = Path(__file__).parents[1] / "fixtures" / "playbooks"
DATABASE = "flow_database"
"""The credential with which the playbooks find their database."""

RESULT_BYTES_MAX = 2048
ROWS_PER_ITEM_MAX = 4

Status = Literal["COMPLETED", "FAILED", "CANCELLED"]

ENDS = ("execution.completed", "execution.failed", "execution.cancelled")
LOOP_STARTS = ("loop.started", "loop.fanout.started")
LOOP_ENDS = ("loop.done", "loop.fanin.completed")
CALL_ENDS = ("call.done", "call.error", "command.expired", "loop.shard.done", "loop.shard.failed")

_EVENTS = """
SELECT event_id, event_key, event_type, node_name, command_id, loop_id, iter_index, attempt,
       parent_event_id, context, meta, error, created_at,
       coalesce(octet_length(result::text), 0) AS bytes
FROM noetl.event WHERE execution_id = $1 ORDER BY event_id
"""
_OPEN = """
SELECT 'command ' || command_id AS what FROM noetl.command WHERE execution_id = $1
UNION ALL SELECT 'timer ' || timer FROM noetl.timer WHERE execution_id = $1
UNION ALL SELECT 'dead letter: ' || reason FROM noetl.dead_letter WHERE execution_id = $1
"""
_CHILDREN = """
SELECT execution_id FROM noetl.event
WHERE parent_execution_id = $1 AND event_type = 'execution.started' ORDER BY execution_id
"""
_RESULTS = """
SELECT r.inline FROM noetl.event AS e
JOIN noetl.result_ref AS r ON r.execution_id = e.execution_id AND r.ref_id = e.event_id
WHERE e.execution_id = $1 AND e.node_name = $2 AND e.event_type IN ('call.done', 'loop.shard.done')
ORDER BY e.event_id
"""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the log, as far as tests ask."""

    event_id: int
    event_key: str
    event_type: str
    node_name: str | None
    command_id: str | None
    loop_id: int | None
    iter_index: int | None
    attempt: int | None
    parent_event_id: int | None
    context: dict[str, Any]
    meta: dict[str, Any]
    error: dict[str, Any] | None
    at: float
    bytes: int


class Execution:
    """One that has ended: its log, and what its steps returned."""

    def __init__(self, execution_id: int, events: list[Event], view: Any, steps: Any) -> None:
        self.execution_id = execution_id
        self.events = events
        self.view: dict[str, Any] = view
        self.steps: dict[str, Any] = steps

    def result(self, step: str) -> Any:
        return self.steps[step]["result"]

    def of(self, *event_types: str, step: str | None = None) -> list[Event]:
        wanted = [event for event in self.events if event.event_type in event_types]
        return wanted if step is None else [event for event in wanted if event.node_name == step]

    def count(self, *event_types: str, step: str | None = None) -> int:
        return len(self.of(*event_types, step=step))

    def entered(self) -> list[str]:
        return [str(event.node_name) for event in self.of("step.enter")]

    def keys(self) -> Counter[str]:
        """What happened, without when: the same for two runs of the same playbook.

        Barriers come by the clock. Attempts that were lost with a worker are left in.
        """
        keys = (e.event_key for e in self.events if e.event_type != "checkpoint.committed")
        return Counter(keys)

    def spans(self, step: str) -> list[tuple[float, float]]:
        """When each call of a step ran, in seconds: it ended when that was recorded, or before."""
        ended = self.of(*CALL_ENDS, step=step)
        return [(e.at - e.meta.get("duration_ms", 0.0) / 1000, e.at) for e in ended]


class Flow:
    """A running stack that knows the playbooks, a database for them and an API to call."""

    def __init__(self, stack: Stack, api: str = "") -> None:
        self.stack = stack
        self.api = api

    async def prepare(self) -> None:
        credential = {"name": DATABASE, "type": "postgres", "data": {"dsn": self.stack.info["dsn"]}}
        answer = await self.stack.client.put("/api/credentials", json=credential)
        assert answer.is_success, answer.text
        for file in sorted(PLAYBOOKS.glob("*.yaml")):
            await self.stack.register(file.read_text())

    async def start(self, playbook: str, **payload: Any) -> int:
        """`playbook` is the name of a file in tests/fixtures/playbooks."""
        if self.api:
            payload = {"api": self.api, **payload}
        return await self.stack.execute(f"tests/{playbook}", payload)

    async def run(
        self, playbook: str, *, ends: Status = "COMPLETED", seconds: float = 120.0, **payload: Any
    ) -> Execution:
        execution_id = await self.start(playbook, **payload)
        return await self.ended(execution_id, ends, seconds=seconds)

    async def ended(
        self, execution_id: int, ends: Status = "COMPLETED", *, seconds: float = 120.0
    ) -> Execution:
        """The execution when it has ended as it should, and it and its children are sound."""
        await self.stack.until_ended(execution_id, seconds=seconds)
        execution = await self._read(execution_id)
        assert execution.view["status"] == ends, why(execution)
        await self.assert_sound(execution)
        for child in await self.children(execution_id):
            await self.stack.until_ended(child, seconds=seconds)
            await self.assert_sound(await self._read(child))
        return execution

    async def child(self, execution_id: int) -> Execution:
        """One that has ended, however."""
        await self.stack.until_ended(execution_id)
        return await self._read(execution_id)

    async def children(self, execution_id: int) -> list[int]:
        """Children and what they have started in turn."""
        found: list[int] = []
        for row in await self.stack.query(_CHILDREN, execution_id):
            found += [row["execution_id"], *await self.children(row["execution_id"])]
        return found

    async def signal(self, execution_id: int, name: str, **more: Any) -> None:
        path = f"/api/executions/{execution_id}/signal"
        answer = await self.stack.client.post(path, json={"name": name, **more})
        assert answer.status_code == 202, answer.text

    async def cancel(self, execution_id: int) -> None:
        answer = await self.stack.client.post(f"/api/executions/{execution_id}/cancel", json={})
        assert answer.status_code == 202, answer.text

    async def until(
        self, execution_id: int, event_type: str, *, step: str, seconds: float = 60.0
    ) -> None:
        deadline = time.monotonic() + seconds
        while not any(
            event.event_type == event_type and event.node_name == step
            for event in await self.events(execution_id)
        ):
            assert time.monotonic() < deadline, f"no {event_type} of {step} in {seconds} s"
            await asyncio.sleep(0.05)

    async def results(self, execution: Execution, step: str) -> list[Any]:
        """What each call of each visit returned, in the order in which they ended."""
        rows = await self.stack.query(_RESULTS, execution.execution_id, step)
        return [msgspec.json.decode(row["inline"]) for row in rows]

    async def events(self, execution_id: int) -> list[Event]:
        return [_event(row) for row in await self.stack.query(_EVENTS, execution_id)]

    async def assert_sound(self, execution: Execution) -> None:
        """What holds for every execution that has ended, whatever it was for."""
        assert_log_is_sound(execution)
        left_over = await self.stack.query(_OPEN, execution.execution_id)
        assert [row["what"] for row in left_over] == []

    async def _read(self, execution_id: int) -> Execution:
        """Its last event and its status are the same moment: the log says when to look."""
        events = await self.events(execution_id)
        view = await self._projected(execution_id, events[-1].event_id)
        answer = await self.stack.client.get(f"/api/executions/{execution_id}/steps")
        assert answer.is_success, answer.text
        return Execution(execution_id, events, view, answer.json())

    async def _projected(self, execution_id: int, event_id: int, *, seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            answer = await self.stack.client.get(f"/api/executions/{execution_id}")
            if answer.is_success and int(answer.json()["last_event_id"] or 0) >= event_id:
                return answer.json()
            assert time.monotonic() < deadline, answer.text
            await asyncio.sleep(0.02)


def assert_log_is_sound(execution: Execution) -> None:
    assert _more_than_once(execution.keys()) == []
    issued = execution.of("command.issued")
    assert _more_than_once(Counter(event.command_id for event in issued)) == []
    ended = Counter(event.command_id for event in execution.of(*CALL_ENDS))
    assert _more_than_once(ended) == []
    assert ended.keys() <= {event.command_id for event in issued}
    assert execution.count(*ENDS) == 1
    assert max(event.bytes for event in execution.events) < RESULT_BYTES_MAX
    _assert_loops_end_once(execution)
    _assert_items_are_cheap(execution)


def _assert_loops_end_once(execution: Execution) -> None:
    """A loop that was stopped from outside (by time, by a failure beside it) may have no end."""
    ends = Counter(event.loop_id for event in execution.of(*LOOP_ENDS))
    started = {event.event_id for event in execution.of(*LOOP_STARTS)}
    assert _more_than_once(ends) == []
    assert ends.keys() <= started
    if execution.view["status"] == "COMPLETED" and not execution.count("step.aborted"):
        assert ends.keys() == started


def _assert_items_are_cheap(execution: Execution) -> None:
    """Of items that went well at once; attempts and pages have rows of their own."""
    of_items = [event for event in execution.events if event.iter_index is not None]
    rows = Counter((event.loop_id, event.iter_index) for event in of_items)
    for event in of_items:
        if event.event_type == "retry.completed" or (event.attempt or 1) > 1:
            del rows[event.loop_id, event.iter_index]
    expensive = {item: count for item, count in rows.items() if count > ROWS_PER_ITEM_MAX}
    assert not expensive


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """How many calls ran at the same time, at most."""
    moments = [(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]
    running, most = 0, 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most


def why(execution: Execution) -> str:
    """The last errors, for the message of a test that fails."""
    errors = [f"{e.event_type} {e.node_name}: {e.error}" for e in execution.events if e.error]
    types = [f"{e.event_type} {e.command_id or e.node_name or ''}" for e in execution.events[-5:]]
    return "\n".join([str(execution.view["status"]), *errors[-3:], *types])


def _more_than_once(counts: Counter[Any]) -> list[Any]:
    return [what for what, count in counts.items() if count > 1]


def _event(row: Any) -> Event:
    columns = dict(row)
    at = columns.pop("created_at").timestamp()
    for name in ("context", "meta", "error"):
        columns[name] = None if columns[name] is None else msgspec.json.decode(columns[name])
    columns["context"] = columns["context"] or {}
    columns["meta"] = columns["meta"] or {}
    return Event(**columns, at=at)
