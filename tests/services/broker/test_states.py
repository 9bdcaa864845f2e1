"""How much the broker keeps in memory: not only how many states, also how large they are."""

from noetl_broker.states import States
from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT
from noetl_core.store.postgres import Pool

ONE, TWO, THREE = map(ExecutionId, (1, 2, 3))


def a_turn_with(states: States, execution_id: ExecutionId, *, size: int) -> None:
    states.get(execution_id).state.ctx = {"text": "x" * size}
    states.settle(execution_id)
    states.trim()


def test_large_states_make_room_the_longest_untouched_first() -> None:
    states = States(states_max=100, bytes_max=10_000, shard_count=SHARD_COUNT_DEFAULT)
    for one in (ONE, TWO, ONE):
        a_turn_with(states, one, size=4000)

    a_turn_with(states, THREE, size=4000)

    assert set(states._live) == {ONE, THREE}


def test_a_state_counts_as_large_as_it_has_become() -> None:
    states = States(states_max=100, bytes_max=10_000, shard_count=SHARD_COUNT_DEFAULT)
    a_turn_with(states, ONE, size=4000)
    a_turn_with(states, TWO, size=10)

    a_turn_with(states, TWO, size=9000)
    assert set(states._live) == {TWO}

    a_turn_with(states, TWO, size=10)
    a_turn_with(states, ONE, size=4000)
    assert set(states._live) == {ONE, TWO}


async def test_what_is_read_only_counts_too(pool: Pool) -> None:
    states = States(states_max=100, bytes_max=100, shard_count=SHARD_COUNT_DEFAULT)
    many = [ExecutionId(number) for number in range(50)]

    async with pool.acquire() as conn:
        await states.load(conn, many)
    states.trim()

    assert 0 < len(list(states._live)) < len(many)
