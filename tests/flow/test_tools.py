"""Tools side by side on real services, and rows that are looked at while the rest is read."""

from support.flow import CALL_ENDS, Execution, Flow, most_at_once

SECONDS = 0.3
TOOLS = [f"use_{tool}" for tool in ("python", "http", "postgres", "shell", "duckdb")]


async def test_five_tools_run_five_items_each_and_none_waits_for_another(flow: Flow) -> None:
    delays: list[str] = []
    while (delay := delay_of(await all_tools(flow))) is not None:
        delays.append(delay)
        # A machine that others use keeps one of three waiting, not each.
        assert len(delays) < 3, delays


async def all_tools(flow: Flow) -> Execution:
    execution = await flow.run("tooling_non_blocking")

    counts = {tool: execution.count("command.issued", step=tool) for tool in TOOLS}
    assert counts == dict.fromkeys(TOOLS, 5)
    assert {tool: execution.count(*CALL_ENDS, step=tool) for tool in TOOLS} == counts
    assert execution.count("call.done") == 5 * 5 + 2
    assert execution.entered()[-1] == "finish"
    return execution


def delay_of(execution: Execution) -> str | None:
    """Who has waited for whom, if anybody has."""
    for tool in TOOLS:
        if most_at_once(execution.spans(tool)) <= 1:
            return f"{tool} ran one item after the other"
    asleep = [span for tool in TOOLS[:4] for span in execution.spans(tool)]
    wall_seconds = max(end for _, end in asleep) - min(start for start, _ in asleep)
    busy_seconds = sum(end - start for start, end in asleep)
    assert busy_seconds > 4 * 5 * SECONDS
    if wall_seconds < busy_seconds / 2:
        return None
    return f"{wall_seconds:.1f} s for {busy_seconds:.1f} s, more than half of one by one"


async def test_ten_thousand_rows_come_in_ten_chunks_and_each_is_looked_at(flow: Flow) -> None:
    execution = await flow.run("streaming_chunks")

    chunks = execution.of("call.partial", step="read")
    assert [event.meta["chunk_index"] for event in chunks] == list(range(10))
    assert execution.count("call.done", step="read") == 1
    seen = await flow.results(execution, "consume")
    seen.sort(key=lambda chunk: chunk["first"])
    assert [(chunk["first"], chunk["last"]) for chunk in seen] == [
        (first, first + 999) for first in range(1, 10_000, 1000)
    ]
    assert [chunk["count"] for chunk in seen] == [1000] * 10
    assert sum(chunk["doubled"] for chunk in seen) == 10_000 * 10_001
    assert execution.entered().count("finish") == 1
