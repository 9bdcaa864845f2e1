"""What came of a visit: of a call, of a loop, of pages, of a wait that a signal has ended."""

from collections.abc import Iterator
from typing import Any

import msgspec

from noetl_core.domain.envelope import Envelope, ParentReference, Reference
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CommandExpired,
    LoopDone,
    RetryCompleted,
    StepAborted,
    StepEntered,
    type_name,
)
from noetl_core.domain.fold import loop_of
from noetl_core.domain.ids import CommandId, EventId, RefId, parse_command_id, visit_id
from noetl_core.domain.known import Known
from noetl_core.domain.playbook import Playbook, Step
from noetl_core.domain.retry import judged
from noetl_core.domain.route import Outcome
from noetl_core.domain.state import ExecutionState, OpenCommand, Signal, Visit


def call_outcome(state: ExecutionState, fact: CallDone | CallFailed | CommandExpired) -> Outcome:
    if isinstance(fact, CommandExpired):
        envelope = Envelope(status="error", parent_ref=parent_of(state, fact))
        return Outcome(envelope=envelope, error=fact.error)
    error = fact.error if isinstance(fact, CallFailed) else None
    return Outcome(envelope=fact.result, error=error)


def loop_outcome(state: ExecutionState, fact: LoopDone) -> Outcome:
    return Outcome(
        envelope=Envelope(
            status=fact.status,
            reference=Reference(ref_id=RefId(fact.loop_id), type="eventlog"),
            parent_ref=parent_of(state, fact),
            context={
                "stats.total": fact.total,
                "stats.success": fact.done,
                "stats.failed": fact.failed,
            },
        ),
        event_name=type_name(fact),
        error=None if fact.status == "ok" else _loop_error(state, fact),
        fanin={
            "status": fact.fanin,
            "done": fact.done,
            "failed": fact.failed,
            "total": fact.total,
        },
    )


def _loop_error(state: ExecutionState, fact: LoopDone) -> ToolError:
    message = f"{fact.failed} of {fact.total} iterations failed"
    first = loop_of(state, fact.step, fact.visit).first_error
    if first is None:
        return ToolError(kind="loop_failed", message=message)
    return ToolError(
        kind="loop_failed",
        message=f"{message}; the first: {first.message}",
        details={"first": {"kind": first.kind, "message": first.message}},
    )


def pages_collected(step: Step, fact: CallDone, event_id: EventId) -> RetryCompleted:
    rule = step.retry.on_success
    assert rule is not None, step.step
    sequence = fact.sequence or event_id
    return RetryCompleted(
        step=fact.step,
        visit=fact.visit,
        result=msgspec.structs.replace(
            fact.result, reference=Reference(ref_id=RefId(sequence), type="pages"), context={}
        ),
        sequence=sequence,
        pages=parse_command_id(fact.command_id).page,
        collect=rule.collect,
        merge_path=rule.merge_path,
        loop_id=fact.loop_id,
        iter_index=fact.iter_index,
    )


def no_outcome(state: ExecutionState, fact: StepEntered, event_name: str = "call.done") -> Outcome:
    envelope = Envelope(status="ok", parent_ref=parent_of(state, fact))
    return Outcome(envelope=envelope, event_name=event_name)


def parent_of(
    state: ExecutionState, fact: StepEntered | StepAborted | CommandExpired | LoopDone
) -> ParentReference:
    visit: Visit = state.visits[visit_id(fact.step, fact.visit)]
    return ParentReference(ref_id=None if visit.parent_ref is None else RefId(visit.parent_ref))


def not_a_list(step: Step, collection: object) -> ToolError:
    return ToolError(
        kind="loop_collection",
        message=(
            f"`loop.in` of step {step.step!r} must give a list, "
            f"but it gave a {type(collection).__name__}"
        ),
    )


def end_waits(
    playbook: Playbook, state: ExecutionState, event_id: EventId, known: Known
) -> Iterator[AnyFact]:
    """What a signal ends: the oldest wait for its name. A signal ends one, a wait takes one."""
    for signal in state.signals:
        for command_id, command in state.commands.items():
            if _waits_for(command, signal):
                fact = _ended_by(state, command_id, command, signal)
                yield judged(playbook, state, fact, event_id, known)
                return


def _waits_for(command: OpenCommand, signal: Signal) -> bool:
    parked = command.parked
    if parked is None or parked.signal != signal.name:
        return False
    return not parked.approvers or signal.by in parked.approvers


def _ended_by(
    state: ExecutionState, command_id: CommandId, command: OpenCommand, signal: Signal
) -> CallDone | CallFailed:
    assert command.worker_id is not None, command_id
    visit = state.visits[visit_id(command.step, command.visit)]
    reference = None if signal.result is None else signal.result.reference
    parent = ParentReference(ref_id=None if visit.parent_ref is None else RefId(visit.parent_ref))
    common: dict[str, Any] = {
        "step": command.step,
        "visit": command.visit,
        "command_id": command_id,
        "worker_id": command.worker_id,
        "attempt": command.attempt,
        "iter_index": command.index,
        "loop_id": None if visit.loop is None else visit.loop.loop_id,
        "signal_id": signal.signal_id,
    }
    if signal.approved:
        envelope = Envelope(status="ok", reference=reference, parent_ref=parent)
        return CallDone(**common, result=envelope)
    by = f" by {signal.by}" if signal.by else ""
    return CallFailed(
        **common,
        result=Envelope(status="error", reference=reference, parent_ref=parent),
        error=ToolError(kind="denied", message=f"`{signal.name}` was denied{by}"),
    )
