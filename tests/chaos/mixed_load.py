"""A load that uses what matters of the language, and whose log is the same however it is run.

    begin ─> half of the loop is done ─> disturb ─> from outside ─> all that does not wait for time
        has ended ─> mend ─> everything has ended

What has to come from outside (a signal, an approval, a cancel, two more starts) comes after the
disturbance.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from support.flow import Event, Flow, Status

ITEMS = 1000
SHARDS = 200
CHAIN = 30
CHILDREN = 10

_HEAD = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {{name: {0}, path: tests/mixed_{0}}}\n"

_LOOP = """
workflow:
  - step: each
    loop: {in: "{{ range(1000) | list }}", iterator: item, spec: {max_in_flight: 40}}
    tool:
      kind: python
      input: {item: "{{ iter.item }}"}
      code: |
        import time
        time.sleep(0.01)
        result = item * 2
    next: {arcs: [{step: total}]}
  - step: total
    tool: {kind: noop, value: "{{ each.results | sum }}"}
"""

# Every tenth shard fails once and is tried again; every fiftieth fails for good.
_FAN_OUT = """
workload: {api: ""}
workflow:
  - step: spread
    spec: {loop_mode: fanout, fanout: {max_shard_retries: 2, allow_partial: true}}
    loop: {in: "{{ range(200) | list }}", iterator: number}
    tool:
      kind: http
      url: "{{ workload.api }}/paged/flaky"
      params:
        key: "{{ execution_id }}-{{ iter.number }}"
        flaky_page: "{{ 1 if iter.number % 10 == 3 else 0 }}"
        failures: "{{ 9 if iter.number % 50 == 3 else 1 }}"
        total: 1
    next:
      arcs:
        - {step: partial, when: "{{ fanin.status == 'partial' }}"}
        - {step: otherwise}
  - step: partial
    tool: {kind: noop, value: "{{ spread.stats }}"}
  - step: otherwise
    tool: {kind: fail, message: some shards fail for good and the others do not}
"""

_CHAIN = "workflow:\n" + "".join(
    f"  - step: s{number}\n    tool: {{kind: noop, value: {number}}}\n"
    + (f"    next: {{arcs: [{{step: s{number + 1}}}]}}\n" if number < CHAIN else "")
    for number in range(1, CHAIN + 1)
)

_FAMILY = """
workflow:
  - step: call
    loop: {in: "{{ range(10) | list }}", iterator: number}
    tool:
      kind: playbook
      path: tests/mixed_child
      input: {number: "{{ iter.number }}"}
      return_step: double
    next: {arcs: [{step: total}]}
  - step: total
    tool: {kind: noop, value: "{{ call.results | sum }}"}
"""
_CHILD = """
workload: {number: 0}
workflow:
  - step: rest
    tool: {kind: wait, seconds: 1}
    next: {arcs: [{step: double}]}
  - step: double
    tool: {kind: noop, value: "{{ workload.number * 2 }}"}
"""

_TIMER = """
workflow:
  - step: rest
    tool: {kind: wait, seconds: 8}
    next: {arcs: [{step: over}]}
  - step: over
    tool: {kind: noop, value: rested}
"""

_ASKED = """
workflow:
  - step: listen
    tool: {kind: wait, signal: news}
    next: {arcs: [{step: ask}]}
  - step: ask
    tool: {kind: approval, message: "{{ listen.text }}?", approvers: [ann]}
    next: {arcs: [{step: told}]}
  - step: told
    tool: {kind: noop, value: "{{ listen.text }}"}
"""

_ENDLESS = """
workflow:
  - step: sleep
    tool: {kind: python, code: "import time\\ntime.sleep(300)"}
"""

PLAYBOOKS = {
    "loop": _LOOP,
    "fan_out": _FAN_OUT,
    "chain": _CHAIN,
    "child": _CHILD,
    "family": _FAMILY,
    "timer": _TIMER,
    "asked": _ASKED,
    "endless": _ENDLESS,
}

_FAMILY_TOTAL = ("total", sum(2 * number for number in range(CHILDREN)))
RESULTS: dict[str, tuple[str, Any]] = {
    "loop": ("total", sum(2 * item for item in range(ITEMS))),
    "fan_out": ("partial", {"total": SHARDS, "success": SHARDS - 4, "failed": 4}),
    "chain": (f"s{CHAIN}", CHAIN),
    "family": _FAMILY_TOTAL,
    "timer": ("over", "rested"),
    "asked": ("told", "good"),
    "late chain": (f"s{CHAIN}", CHAIN),
    "late family": _FAMILY_TOTAL,
}
"""A step of each execution that completes, and its result. `endless` is cancelled."""

WAITING = ("timer", "family", "late family")
"""What needs a timer, and so a reaper."""

Key = tuple[str, str]
Log = dict[str, Counter[Key]]
"""By name: how often which key of which type was recorded; of children, under their caller."""


class Run(NamedTuple):
    """What came of one run of the load."""

    log: Log
    executions: dict[str, int]
    chain_seconds: float
    """Of the chain that was started after the disturbance."""
    loop_rates: tuple[float, float]
    """Items a second of the loop, before the disturbance and after."""
    seconds: float

    def __str__(self) -> str:
        before, after = self.loop_rates
        step_ms = self.chain_seconds / CHAIN * 1000
        return (
            f"{self.seconds:.1f} s; {before:.0f} items/s before, {after:.0f} after;"
            f" {step_ms:.0f} ms a step after"
        )


async def prepare(flow: Flow) -> None:
    for name, body in PLAYBOOKS.items():
        await flow.stack.register(_HEAD.format(name) + body)


async def _nothing() -> None:
    pass


async def run(
    flow: Flow,
    disturb: Callable[[], Awaitable[object]] = _nothing,
    *,
    mend: Callable[[], Awaitable[object]] = _nothing,
) -> Run:
    """Sound in every way that `Flow.ended` looks at, with the right results; else it fails."""
    begun = time.monotonic()
    names = ["loop", "fan_out", "chain", "family", "timer", "asked", "endless"]
    started = {name: await flow.start(f"mixed_{name}") for name in names}
    await flow.until(started["asked"], "command.parked", step="listen", seconds=120)
    await flow.until(started["endless"], "command.claimed", step="sleep", seconds=120)
    await flow.stack.until_done(started["loop"], ITEMS // 2)
    await disturb()
    disturbed_at = time.time()
    await _from_outside(flow, started)
    log = {name: await _ended(flow, name, started[name]) for name in started.keys() - WAITING}
    await mend()
    log |= {name: await _ended(flow, name, started[name]) for name in WAITING}
    return Run(
        log=log,
        executions=started,
        chain_seconds=await _seconds(flow, started["late chain"]),
        loop_rates=await _rates(flow, started["loop"], disturbed_at),
        seconds=time.monotonic() - begun,
    )


async def _from_outside(flow: Flow, started: dict[str, int]) -> None:
    await flow.signal(started["asked"], "news", data={"text": "good"})
    await flow.cancel(started["endless"])
    started["late chain"] = await flow.start("mixed_chain")
    started["late family"] = await flow.start("mixed_family")
    await flow.until(started["asked"], "command.parked", step="ask", seconds=120)
    await flow.signal(started["asked"], "ask", by="ann")


async def _ended(flow: Flow, name: str, execution_id: int) -> Counter[Key]:
    status: Status = "CANCELLED" if name == "endless" else "COMPLETED"
    execution = await flow.ended(execution_id, status, seconds=240)
    if name in RESULTS:
        step, expected = RESULTS[name]
        assert execution.result(step) == expected, name
    log = keys_of(execution.events)
    for child_id in await flow.children(execution_id):
        child = await flow.child(child_id)
        (begun,) = child.of("execution.started")
        caller = begun.context["parent_command_id"]
        for (kind, key), count in keys_of(child.events).items():
            log[kind, f"{caller} > {key}"] += count
    return log


def keys_of(events: list[Event]) -> Counter[Key]:
    """Barriers come by the clock, and the key of a signal has the id that the gateway gave it."""
    return Counter(
        (event.event_type, "signal" if event.event_key.startswith("signal:") else event.event_key)
        for event in events
        if event.event_type != "checkpoint.committed"
    )


_SECONDS = """
SELECT extract(epoch FROM max(created_at) - min(created_at))::float8
FROM noetl.event WHERE execution_id = $1
"""


async def _seconds(flow: Flow, execution_id: int) -> float:
    return float((await flow.stack.query(_SECONDS, execution_id))[0][0])


_RATES = """
SELECT count(*) FILTER (WHERE at < $2) AS before, count(*) FILTER (WHERE at >= $2) AS after,
       min(at) AS first, max(at) AS last
FROM (
    SELECT extract(epoch FROM created_at)::float8 AS at FROM noetl.event
    WHERE execution_id = $1 AND event_type = 'call.done' AND node_name = 'each'
) AS ends
"""


async def _rates(flow: Flow, execution_id: int, disturbed_at: float) -> tuple[float, float]:
    (row,) = await flow.stack.query(_RATES, execution_id, disturbed_at)
    before = row["before"] / max(0.001, disturbed_at - row["first"])
    return before, row["after"] / max(0.001, row["last"] - disturbed_at)
