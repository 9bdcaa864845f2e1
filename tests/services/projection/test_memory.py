"""What a projection forgets, and when."""

from datetime import UTC, datetime

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.domain.state import ExecutionState, ExecutionStatus
from noetl_core.store.execution_projection import Projected, Reached
from noetl_projection.memory import Memory

NOW = datetime(2026, 11, 18, tzinfo=UTC)


def projected(
    execution_id: int, shard: int = 0, status: ExecutionStatus = "RUNNING"
) -> dict[ExecutionId, Projected]:
    key = ExecutionId(execution_id)
    one = Projected(
        state=ExecutionState(execution_id=key, status=status),
        shard_id=ShardId(shard),
        started_at=NOW,
        updated_at=NOW,
        last_event_type="step.enter",
        last_event_id=EventId(1),
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
