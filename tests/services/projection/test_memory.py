"""What a projection forgets, and when."""

from datetime import UTC, datetime

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.domain.state import ExecutionState, ExecutionStatus
from noetl_core.store.execution_projection import Projected, Reached
from noetl_projection.memory import Memory

NOW = datetime(2026, 11, 18, tzinfo=UTC)


def projected(
    execution_id: int, shard: int = 0, status: ExecutionStatus = "RUNNING", *, size: int = 0
) -> dict[ExecutionId, Projected]:
    key = ExecutionId(execution_id)
    one = Projected(
        state=ExecutionState(execution_id=key, status=status),
        shard_id=ShardId(shard),
        started_at=NOW,
        updated_at=NOW,
        last_event_type="step.enter",
        last_event_id=EventId(1),
        state_bytes=size,
    )
    return {key: one}


def holding(*shards: int, executions_max: int = 10) -> Memory:
    memory = Memory(executions_max=executions_max)
    memory.keep({ShardId(shard): 1 for shard in shards})
    for shard in shards:
        memory.remember(projected(100 + shard, shard), {ShardId(shard): Reached(EventId(7), NOW)})
    return memory


def test_a_shard_that_is_gone_takes_its_states_and_its_watermark_along() -> None:
    memory = holding(0, 1)

    memory.keep({ShardId(1): 1})

    assert set(memory.recall([ExecutionId(100), ExecutionId(101)])) == {101}
    assert set(memory.watermarks) == {1}


def test_a_shard_that_came_back_under_a_new_epoch_is_read_anew() -> None:
    memory = holding(0)

    memory.keep({ShardId(0): 2})

    assert memory.recall([ExecutionId(100)]) == {}
    assert memory.watermarks == {}
    assert memory.epochs == {0: 2}


def test_an_ended_execution_is_not_kept() -> None:
    memory = holding(0)

    memory.remember(projected(100, status="COMPLETED"), {})

    assert memory.recall([ExecutionId(100)]) == {}


def test_the_execution_that_was_untouched_the_longest_makes_room() -> None:
    memory = holding(0, executions_max=2)
    memory.remember(projected(1), {})
    memory.remember(projected(100), {})

    memory.remember(projected(2), {})

    assert set(memory.recall(map(ExecutionId, (1, 2, 100)))) == {2, 100}


def test_states_that_are_large_together_make_room_the_longest_untouched_first() -> None:
    memory = Memory(executions_max=100, bytes_max=1000)
    for number in (1, 2, 3):
        memory.remember(projected(number, size=300), {})
    memory.remember(projected(1, size=300), {})

    memory.remember(projected(4, size=350), {})

    assert set(memory.recall(map(ExecutionId, range(9)))) == {1, 3, 4}


def test_what_was_let_go_of_takes_no_room() -> None:
    memory = Memory(executions_max=100, bytes_max=1000)
    memory.keep({ShardId(0): 1, ShardId(1): 1})
    memory.remember(projected(1, size=900) | projected(2, 1, size=50), {})
    memory.remember(projected(1, status="COMPLETED", size=900), {})
    memory.remember(projected(3, 1, size=800), {})
    memory.keep({ShardId(0): 1})

    memory.remember(projected(4, size=500) | projected(5, size=500), {})

    assert set(memory.recall(map(ExecutionId, range(9)))) == {4, 5}


def test_a_state_that_is_larger_than_all_room_is_kept_alone() -> None:
    memory = Memory(executions_max=100, bytes_max=1000)
    memory.remember(projected(1, size=100), {})

    memory.remember(projected(2, size=5000), {})

    assert set(memory.recall(map(ExecutionId, range(9)))) == {2}
