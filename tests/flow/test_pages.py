"""Pages on real services: each is a command of its own, and together they are the result."""

from support.flow import Flow

ROWS = [{"id": number, "square": number * number} for number in range(35)]


async def test_every_way_of_paging_comes_to_the_last_row(flow: Flow) -> None:
    execution = await flow.run("pagination")

    for step in ("by_page", "by_offset", "by_cursor", "flaky"):
        assert execution.result(step) == ROWS, step
        assert execution.count("call.done", step=step) == 4, step
        assert execution.count("retry.completed", step=step) == 1, step
    assert execution.result("finish") == {
        "by_page": list(range(35)),
        "squares": sum(row["square"] for row in ROWS),
    }


async def test_a_page_that_fails_is_tried_again_and_the_others_are_not(flow: Flow) -> None:
    execution = await flow.run("pagination")

    issued = [event.command_id for event in execution.of("command.issued", step="flaky")]
    assert issued == [
        "flaky.1#1",
        *("flaky.1@2#1", "flaky.1@2#2", "flaky.1@2#3"),
        "flaky.1@3#1",
        "flaky.1@4#1",
    ]
    ends = {e.event_id for e in execution.of("call.done", "call.error", step="flaky")}
    followers = execution.of("command.issued", step="flaky")[1:]
    assert {event.parent_event_id for event in followers} <= ends


async def test_endless_pages_end_at_the_limit(flow: Flow) -> None:
    execution = await flow.run("pagination")

    assert [row["id"] for row in execution.result("limited")] == [1, 2, 3, 4, 5]
    assert execution.count("command.issued", step="limited") == 5


async def test_every_item_of_a_loop_has_its_own_pages(flow: Flow) -> None:
    execution = await flow.run("loop_with_pagination")

    totals = [5, 25, 35, 10, 41]
    assert execution.result("count") == totals
    assert [row["id"] for row in execution.result("each")[4]] == list(range(41))
    pages = [-(-total // 10) for total in totals]
    assert execution.count("call.done", step="each") == sum(pages)
    assert execution.count("call.error", step="each") == sum(page > 1 for page in pages)
    assert execution.count("loop.done") == 1
