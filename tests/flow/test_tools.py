"""Tools side by side on real services, and rows that are looked at while the rest is read."""

from support.flow import CALL_ENDS, Flow, most_at_once

SECONDS = 0.3


async def test_five_tools_run_five_items_each_and_none_waits_for_another(flow: Flow) -> None:
    execution = await flow.run("tooling_non_blocking")

    tools = [f"use_{tool}" for tool in ("python", "http", "postgres", "shell", "duckdb")]
    counts = {tool: execution.count("command.issued", step=tool) for tool in tools}
    assert counts == dict.fromkeys(tools, 5)
    assert {tool: execution.count(*CALL_ENDS, step=tool) for tool in tools} == counts
    assert execution.count("call.done") == 5 * 5 + 2
    for tool in tools:
        assert most_at_once(execution.spans(tool)) > 1, f"{tool} ran one item after the other"
    asleep = [span for tool in tools[:4] for span in execution.spans(tool)]
    wall_seconds = max(end for _, end in asleep) - min(start for start, _ in asleep)
    busy_seconds = sum(end - start for start, end in asleep)
    assert busy_seconds > 4 * 5 * SECONDS
    assert wall_seconds < busy_seconds / 2, "less than half of what it takes one by one"
    assert execution.entered()[-1] == "finish"


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
