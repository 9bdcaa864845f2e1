"""What a loop does next: store its collection in parts, keep its window full, end once.

Counters are all it has. `in_flight` + `done` + `failed` = `next_index` at every moment, and the log
refuses to record an attempt's end twice, so the counts are exact and a million items cost no more
state than ten.

A fan-out is a loop whose items are shards: each is announced, tried again by itself, and may fail
while the loop as a whole is only `partial`. A cursor loop has no collection: its commands claim
rows until a claim is empty, and it ends when every slot has found nothing. A loop that a retry
enters again lists the indexes that were left undone and takes the items from the collection of
before.
"""

from collections.abc import Iterator
from typing import Any

from noetl_core.domain.events import (
    Again,
    CommandIssued,
    FaninCompleted,
    FaninStatus,
    FanoutStarted,
    LoopDone,
    LoopStarted,
    ShardEnqueued,
)
from noetl_core.domain.ids import EventId, LoopId, command_id
from noetl_core.domain.known import Known
from noetl_core.domain.playbook import Loop, Step
from noetl_core.domain.state import LoopState, StepState

PART_SIZE = 500
"""Items in one stored part of a collection."""


def start_loop(step: Step, visit: int, collection: list[Any]) -> LoopStarted:
    return _started(step, visit, total=len(collection))


def start_cursor(step: Step, visit: int) -> LoopStarted:
    return _started(step, visit, total=0, is_cursor=True)


def go_on_with_loop(step: Step, visit: int, before: StepState, undone: list[int]) -> LoopStarted:
    """Only what an earlier activation left undone."""
    return _started(
        step,
        visit,
        total=len(undone),
        base=before.loop_id,
        base_done=(before.total or 0) - len(undone),
        collection_id=before.collection_id,
    )


def _started(step: Step, visit: int, *, total: int, **more: Any) -> LoopStarted:
    assert step.loop is not None, step.step
    spec = step.loop.spec
    kind: type[LoopStarted] = LoopStarted
    fail_fast = step.spec.policy.failure.mode == "fail_fast"
    if spec.mode == "fanout":
        kind, fanout = FanoutStarted, step.spec.fanout
        fail_fast = fanout.fail_fast
        more["shard_retries_max"] = fanout.max_shard_retries
        more["allow_partial"] = fanout.allow_partial
    return kind(
        step=step.step,
        visit=visit,
        total=total,
        part_size=PART_SIZE,
        parts=-(-total // PART_SIZE),
        max_in_flight=1 if spec.mode == "sequential" else spec.max_in_flight,
        fail_fast=fail_fast,
        **more,
    )


def in_chunks(loop: Loop, collection: list[Any]) -> list[Any]:
    """The items as commands get them: each by itself, or `chunk_size` of them as a list."""
    size = loop.spec.chunk_size
    return collection if size is None else list(split(collection, size))


def split(collection: list[Any], part_size: int) -> Iterator[list[Any]]:
    for start in range(0, len(collection), part_size):
        yield collection[start : start + part_size]


def advance_loop(
    step: Step, visit: int, loop: LoopState, known: Known, *, delay_s: float = 0.0
) -> Iterator[ShardEnqueued | CommandIssued | LoopDone]:
    """Fill the window, or, when nothing is left to issue and nothing is open, end the loop.

    Raises ReferenceNeeded when the list of what was left undone is not loaded.
    """
    positions = range(loop.next_index, _until(loop))
    for position in positions:
        index = index_at(loop, position, known)
        if loop.is_fanout:
            yield ShardEnqueued(step=step.step, visit=visit, loop_id=loop.loop_id, iter_index=index)
        again = Again(attempt=1, delay_s=delay_s)
        yield issue(step, visit, again, index=index, loop_id=loop.loop_id)
    if not positions and loop.in_flight == 0:
        yield _end_loop(step, visit, loop)


def _until(loop: LoopState) -> int:
    if loop.fail_fast and loop.failed:
        return loop.next_index
    window = loop.next_index + loop.max_in_flight - loop.in_flight
    return window - loop.slots_ended if loop.is_cursor else min(loop.total, window)


def index_at(loop: LoopState, position: int, known: Known) -> int:
    """Which item is number `position` of this activation."""
    if loop.base is None:
        return position
    part, offset = divmod(position, loop.part_size)
    index: int = known.part(loop.loop_id, part)[offset]
    return index


def issue(
    step: Step,
    visit: int,
    again: Again,
    *,
    index: int | None = None,
    loop_id: LoopId | None = None,
    parent_event_id: EventId | None = None,
) -> CommandIssued:
    return CommandIssued(
        step=step.step,
        visit=visit,
        command_id=command_id(
            step.step, visit, index=index, attempt=again.attempt, page=again.page
        ),
        attempt=again.attempt,
        loop_id=loop_id,
        iter_index=index,
        pool=step.spec.pool,
        priority=step.spec.priority,
        delay_s=again.delay_s,
        page=again.page,
        failures=again.failures,
        given_back=again.given_back,
        call=again.call,
        sequence=again.sequence,
        chunks=again.chunks,
        parent_event_id=parent_event_id,
    )


def _end_loop(step: Step, visit: int, loop: LoopState) -> LoopDone:
    fanin = _fanin(loop)
    has_failed = fanin == "failed" if loop.is_fanout else loop.failed > 0 and loop.fail_fast
    kind = FaninCompleted if loop.is_fanout else LoopDone
    return kind(
        step=step.step,
        visit=visit,
        loop_id=loop.loop_id,
        total=loop.done + loop.failed if loop.is_cursor else loop.base_done + loop.total,
        done=loop.base_done + loop.done,
        failed=loop.failed,
        status="error" if has_failed else "ok",
        fanin=fanin,
    )


def _fanin(loop: LoopState) -> FaninStatus:
    if not loop.failed:
        return "complete"
    if loop.fail_fast or not loop.allow_partial or loop.base_done + loop.done == 0:
        return "failed"
    return "partial"
