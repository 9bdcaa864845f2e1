"""The rows beside the log that go with an event: commands that end, timers, lists of pages."""

import msgspec

from noetl_broker.family import on_end, on_pause
from noetl_broker.turn import Turn
from noetl_core.domain.events import (
    CallDone,
    CallFailed,
    CommandExpired,
    CommandParked,
    Event,
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionPaused,
    ExecutionResumed,
    ExecutionRetried,
    ExecutionStarted,
    RetryCompleted,
    StepAborted,
    StepEntered,
)
from noetl_core.domain.ids import CommandId, ExecutionId, ShardId, StepName, parse_command_id
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.state import ExecutionState
from noetl_core.domain.timers import (
    execution_timer,
    is_timed_by_broker,
    step_timer,
    wait_timer,
)
from noetl_core.domain.tools import PARKED_KINDS
from noetl_core.store.batch import (
    EndedRow,
    ExpiryRow,
    ManifestRow,
    PartRow,
    ResultRow,
    TimerRow,
)
from noetl_core.wire.messages import Stored


def write_beside(  # noqa: C901 - one case an event
    turn: Turn, shard: ShardId, playbook: Playbook, state: ExecutionState, event: Event
) -> None:
    execution_id, batch = event.execution_id, turn.batch
    match event.fact:
        case CallDone() as fact:
            batch.ended.append(EndedRow(execution_id, fact.command_id, fact.worker_id))
            _end_wait(turn, playbook, execution_id, fact.step, fact.command_id)
            if playbook.steps[fact.step].retry.on_success is not None:
                _list_page(turn, event, fact)
        case CallFailed() as fact:
            batch.ended.append(EndedRow(execution_id, fact.command_id, fact.worker_id))
            _end_wait(turn, playbook, execution_id, fact.step, fact.command_id)
            on_end(turn, state, event)
        case CommandExpired() as fact:
            batch.ended.append(EndedRow(execution_id, fact.command_id, None))
        case CommandParked() as fact:
            batch.ended.append(EndedRow(execution_id, fact.command_id, fact.worker_id))
            if fact.until_ms is not None:
                timer = wait_timer(fact.command_id)
                batch.timers.append(TimerRow(execution_id, timer, until_ms=fact.until_ms))
        case StepEntered() as fact:
            _time_step(turn, playbook, execution_id, fact)
        case StepAborted() as fact:
            batch.ended += [EndedRow(execution_id, c, None) for c in fact.commands]
            batch.recall(execution_id, fact.commands)
            _end_wait(turn, playbook, execution_id, fact.step, *fact.commands)
            on_end(turn, state, event)
        case RetryCompleted() as fact:
            batch.manifests.append(_pages_manifest(execution_id, fact))
        case ExecutionStarted() | ExecutionRetried():
            timeout_s = playbook.executor.spec.timeout_s
            if timeout_s is not None:
                timer = execution_timer(state.generation)
                batch.timers.append(TimerRow(execution_id, timer, delay_s=timeout_s))
        case ExecutionPaused() | ExecutionResumed():
            on_pause(turn, state)
        case ExecutionFailed() | ExecutionCancelled() | ExecutionCompleted():
            _end(turn, shard, playbook, state, event)
        case _:
            pass


def _time_step(
    turn: Turn, playbook: Playbook, execution_id: ExecutionId, fact: StepEntered
) -> None:
    step = playbook.steps[fact.step]
    if is_timed_by_broker(step):
        timer = step_timer(fact.step, fact.visit)
        turn.batch.timers.append(TimerRow(execution_id, timer, delay_s=step.spec.timeout_s))


def _end_wait(
    turn: Turn, playbook: Playbook, execution_id: ExecutionId, step: StepName, *commands: CommandId
) -> None:
    """Whatever has ended it: as long as its timer is there, the execution counts as waiting."""
    if any(task.kind in PARKED_KINDS for task in playbook.steps[step].tool):
        for command_id in commands:
            turn.batch.stop_timer(execution_id, wait_timer(command_id))


def _end(
    turn: Turn, shard: ShardId, playbook: Playbook, state: ExecutionState, event: Event
) -> None:
    if not isinstance(event.fact, ExecutionCompleted):
        turn.batch.ended_executions.append(event.execution_id)
    if _may_have_timers(playbook):
        turn.batch.untimed.add(event.execution_id)
    turn.ended_on.add(shard)
    on_end(turn, state, event)


def _list_page(turn: Turn, event: Event, fact: CallDone) -> None:
    """A page is a result of its own; the manifest of its sequence only lists it."""
    if fact.result.reference is None:
        return
    turn.batch.parts.append(
        PartRow(
            event.execution_id,
            fact.sequence or event.event_id,
            parse_command_id(fact.command_id).page - 1,
            1,
            "result",
            None,
            fact.result.reference.bytes,
            None,
            None,
            event.event_id,
        )
    )


def _pages_manifest(execution_id: ExecutionId, fact: RetryCompleted) -> ManifestRow:
    rule = {"collect": fact.collect, "merge_path": fact.merge_path}
    meta = msgspec.json.encode(rule).decode()
    return ManifestRow(
        execution_id, fact.sequence, "pages", fact.step, fact.pages, fact.pages, meta
    )


def _may_have_timers(playbook: Playbook) -> bool:
    steps = playbook.steps.values()
    return playbook.executor.spec.timeout_s is not None or any(
        is_timed_by_broker(step) or any(t.kind in PARKED_KINDS for t in step.tool) for step in steps
    )


def write_result(turn: Turn, event: Event, stored: Stored) -> None:
    fact = event.fact
    parent = getattr(fact, "result", None)
    parent_ref = None if parent is None or parent.parent_ref is None else parent.parent_ref.ref_id
    turn.batch.results.append(
        ResultRow(
            event.execution_id,
            event.event_id,
            parent_ref,
            getattr(fact, "step", ""),
            stored.tier,
            stored.uri,
            stored.media_type,
            stored.size,
            stored.sha256,
            stored.inline,
        )
    )
    if stored.ttl_s is not None:
        turn.batch.expiries.append(ExpiryRow(event.execution_id, event.event_id, stored.ttl_s))
