"""How the items of a loop stand, as the log tells it."""

from noetl_core.domain.envelope import Reference
from noetl_core.domain.events import Again
from noetl_core.domain.ids import RefId
from noetl_core.store import loop_result, manifest
from noetl_core.store.loop_result import Ended
from noetl_core.store.postgres import Pool
from support.loop_log import LoopLog

AGAIN = Again(attempt=2)


async def ended(log: LoopLog, **bounds: int) -> list[Ended]:
    return await loop_result.of_loop(log.pool, log.execution_id, [log.loop_id], **bounds)


async def undone(log: LoopLog) -> list[int]:
    loop = await manifest.activations(log.pool, log.execution_id, log.loop_id)
    assert loop.total is not None
    return await loop_result.undone(log.pool, log.execution_id, loop.loop_ids, total=loop.total)


async def test_items_come_in_order_with_what_they_returned(pool: Pool) -> None:
    log = LoopLog(pool)
    await log.done(2, "c")
    await log.done(0, "a")
    await log.issued(3)
    await log.done(1)
    await log.failed(4)

    found = await ended(log)

    bodies = [(item.iter_index, item.is_done, item.row and item.row.inline) for item in found]
    assert bodies == [(0, True, b'"a"'), (1, True, None), (2, True, b'"c"'), (4, False, None)]
    assert [item.iter_index for item in await ended(log, start=1, stop=3)] == [1, 2]


async def test_only_the_last_end_of_an_item_counts(pool: Pool) -> None:
    log = LoopLog(pool)
    await log.started(7)
    await log.failed(0, again=AGAIN)
    await log.done(0, "second try")
    await log.expired(1, again=AGAIN)
    await log.failed(2, again=AGAIN)
    await log.expired(2)
    await log.paged(3, [1], [2], goes_on=True)
    await log.failed(3, page=3)
    await log.complete(4, await log.paged(4, [1], [2]), pages=2)
    await log.paged(5, [1], goes_on=True)
    await log.done(6, "shard", is_shard=True)

    found = await ended(log)

    assert [(item.iter_index, item.is_done) for item in found] == [
        (0, True),
        (2, False),
        (3, False),
        (4, True),
        (6, True),
    ]
    assert await undone(log) == [1, 2, 3, 5]


async def test_a_result_that_is_not_the_event_s_own_is_a_reference(pool: Pool) -> None:
    log = LoopLog(pool)
    of_child = Reference(ref_id=RefId(77), type="db", bytes=5, execution_id=log.execution_id)
    pages = await log.complete(0, await log.paged(0, [1]), pages=1)
    await log.done(1, reference=of_child)
    await log.done(2, "own")

    assert [item.reference for item in await ended(log)] == [pages, of_child, None]


async def test_items_never_begun_and_failed_ones_are_undone(pool: Pool) -> None:
    log = LoopLog(pool)
    first = await log.started(5)
    await log.done(0, "a")
    await log.failed(1)
    await log.failed(2, is_shard=True)

    assert await undone(log) == [1, 2, 3, 4]

    await log.started(5, base=first)
    await log.done(2, "c", is_shard=True)
    await log.failed(1)
    assert await undone(log) == [1, 3, 4]


async def test_a_loop_goes_on_with_all_activations_before_it(pool: Pool) -> None:
    log = LoopLog(pool)
    first = await log.started(3)
    second = await log.started(3, base=first)
    third = await log.started(3, base=second)

    assert await manifest.activations(pool, log.execution_id, third) == ([third, second, first], 3)
    assert await manifest.activations(pool, log.execution_id, first) == ([first], 3)


async def test_frames_without_rows_are_told_from_those_with_some(pool: Pool) -> None:
    log = LoopLog(pool)
    await log.done(0, "a", frame_rows=10)
    await log.done(1, frame_rows=0)
    await log.done(2)

    assert [item.is_frame for item in await ended(log)] == [True, False, False]
    assert await loop_result.last_index(pool, log.execution_id, [log.loop_id]) == 2


async def test_everything_a_loop_returned_is_weighed(pool: Pool) -> None:
    log = LoopLog(pool)
    child = LoopLog(pool, 2)
    child_pages = await child.complete(None, await child.paged(None, "1234"), pages=1)
    list_of_child = Reference(ref_id=RefId(5), type="eventlog", execution_id=child.execution_id)
    await log.done(0, "12345678")
    await log.complete(1, await log.paged(1, [1], [2]), pages=2)
    await log.done(2, reference=Reference(ref_id=RefId(9), type="db", bytes=1000))
    await log.done(
        3,
        reference=Reference(
            ref_id=child_pages.ref_id, type="pages", execution_id=child.execution_id
        ),
    )
    await log.done(4, reference=list_of_child)
    await log.paged(5, "not complete", goes_on=True)

    weight = await loop_result.weight(pool, log.execution_id, [log.loop_id])

    assert weight == (10 + 3 + 3 + 1000 + 6, [list_of_child])
