"""Fan-out on real services: every shard once, the fan-in once, and the arc that its status says."""

from support.flow import CALL_ENDS, Flow


async def test_a_hundred_shards_run_once_each_and_the_fan_in_comes_once(flow: Flow) -> None:
    execution = await flow.run("fanout_basic")

    shards = execution.of("loop.shard.done")
    assert sorted(event.iter_index or 0 for event in shards) == list(range(100))
    assert execution.count("loop.shard.enqueued") == execution.count("command.issued") - 1 == 100
    assert execution.count("loop.fanin.completed") == 1
    assert execution.result("spread") == [number * 2 for number in range(100)]
    assert execution.result("gather") == {
        "total": 9900,
        "stats": {"total": 100, "success": 100, "failed": 0},
    }


async def test_two_broken_shards_of_ten_make_it_partial(flow: Flow) -> None:
    execution = await flow.run("fanout_partial_failure")

    assert execution.entered() == ["spread", "partial"]
    expected = [None if number in {3, 7} else number for number in range(10)]
    assert execution.result("partial") == {
        "done": 8,
        "failed": 2,
        "total": 10,
        "results": expected,
    }
    assert sorted(e.iter_index or 0 for e in execution.of("loop.shard.failed")) == [3, 7]


async def test_forty_eight_of_fifty_make_it_partial(flow: Flow) -> None:
    execution = await flow.run("fanout_partial_failure", shards=50, broken=[11, 37])

    assert execution.entered() == ["spread", "partial"]
    assert execution.result("partial")["done"] == execution.count("loop.shard.done") == 48
    assert execution.result("partial")["failed"] == execution.count("loop.shard.failed") == 2


async def test_nothing_but_broken_shards_is_a_failure_that_an_arc_can_take(flow: Flow) -> None:
    execution = await flow.run("fanout_partial_failure", shards=3, broken=[0, 1, 2])

    assert execution.entered() == ["spread", "failed"]
    assert execution.count("loop.fanin.completed") == 1


async def test_shards_that_fail_once_are_tried_again_by_themselves(flow: Flow) -> None:
    execution = await flow.run("shard_retry")

    assert execution.entered() == ["spread", "complete"]
    assert execution.result("complete") == {"total": 10, "success": 10, "failed": 0}
    again = execution.of(*CALL_ENDS, step="spread")
    assert sorted(e.iter_index or 0 for e in again if e.attempt == 2) == [1, 4, 8]
    assert execution.count("command.issued", step="spread") == 13
    assert execution.count("loop.shard.done") == 10
