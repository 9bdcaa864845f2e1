"""What an attempt leads to: judged when it has ended and before that is recorded.

Whether another attempt or page follows is a matter of guards, and fold evaluates none. So the
answer stands in the event that ends the attempt (`again`), and with it everything the next one
inherits: a lost worker at page 37 goes on at page 37.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any
from zlib import crc32

import msgspec

from noetl_core.domain.analysis import pushed_paths
from noetl_core.domain.brief import element_of
from noetl_core.domain.ctx import as_recorded
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import TemplateError, ToolError
from noetl_core.domain.events import (
    Again,
    AnyFact,
    CallDone,
    CallFailed,
    CallPartial,
    ShardDone,
    ShardFailed,
    StepAborted,
)
from noetl_core.domain.ids import EventId, visit_id
from noetl_core.domain.known import Known
from noetl_core.domain.merge import deep_merge
from noetl_core.domain.playbook import Circuit, OnError, Playbook, Step
from noetl_core.domain.result_view import error_view
from noetl_core.domain.route import render_recorded, scope_of, send_chunk, template_failure
from noetl_core.domain.scope import Scope, iterator_names, loaded_view
from noetl_core.domain.snowflake import minted_at_ms
from noetl_core.domain.state import ExecutionState, LoopState, OpenCommand
from noetl_core.domain.template import compile_template, is_true

DELAY_SECONDS_MAX = 24 * 3600.0
JITTER_SHARE = 0.5
"""How much of a delay jitter may take away."""

_NEVER_BETTER = frozenset({"template_rendering", "playbook_invalid"})
"""Errors that the next attempt would meet again; retried only where a guard says so."""


def judged(
    playbook: Playbook, state: ExecutionState, fact: AnyFact, event_id: EventId, known: Known
) -> AnyFact:
    """The fact with what follows from it for its call. `event_id` is the id it will have."""
    match fact:
        case CallDone():
            done = _judged_done(playbook, state, fact, event_id, known)
            return _as_shard(state, done)
        case CallFailed():
            return _as_shard(state, _judged_failed(playbook, state, fact, event_id, known))
        case CallPartial():
            try:
                return send_chunk(playbook, state, fact, known)
            except TemplateError as error:
                return abort(state, fact.step, fact.visit, template_failure(error))
        case _:
            return fact


def abort(state: ExecutionState, step: Any, visit: int, error: ToolError) -> StepAborted:
    """The visit is over, whatever is still under way for it."""
    commands = tuple(
        command_id
        for command_id, command in state.commands.items()
        if command.step == step and command.visit == visit
    )
    return StepAborted(step=step, visit=visit, error=error, commands=commands)


def after_loss(command: OpenCommand) -> Again:
    """The same call once more: the worker is gone, not the reason for the call."""
    return Again(
        attempt=command.attempt + 1,
        page=command.page,
        failures=command.failures,
        given_back=command.given_back,
        call=command.call,
        sequence=command.sequence,
        chunks=command.chunks,
    )


def after_given_back(command: OpenCommand) -> Again:
    """The same call once more: the worker stopped, and took nothing down with it."""
    return msgspec.structs.replace(after_loss(command), given_back=command.given_back + 1)


def circuit_delay(state: ExecutionState, step: str, now_ms: int) -> float:
    """How long the circuit breaker of a step still lets nothing through."""
    known = state.steps.get(step)  # type: ignore[call-overload]
    until = 0 if known is None else known.open_until_ms
    return max(0.0, (until - now_ms) / 1000)


def _judged_done(
    playbook: Playbook, state: ExecutionState, fact: CallDone, event_id: EventId, known: Known
) -> CallDone | CallFailed:
    step = playbook.steps[fact.step]
    rule = step.retry.on_success
    command = state.commands[fact.command_id]
    if rule is None or command.page >= rule.max_attempts:
        return fact
    names = _Names(playbook, state, step, command, fact.result, None, known)
    try:
        if not names.holds(rule.condition, "retry.on_success.while"):
            return fact
        overlay = names.rendered(rule.next_call, "retry.on_success.next_call")
    except TemplateError as error:
        return _failed(fact, template_failure(error))
    again = Again(
        attempt=1,
        page=command.page + 1,
        delay_s=rule.delay,
        call=deep_merge(command.call, overlay) if overlay else command.call,
        sequence=command.sequence or event_id,
    )
    return msgspec.structs.replace(fact, again=again)


def _failed(fact: CallDone, error: ToolError) -> CallFailed:
    return CallFailed(
        step=fact.step,
        visit=fact.visit,
        command_id=fact.command_id,
        worker_id=fact.worker_id,
        result=msgspec.structs.replace(fact.result, status="error"),
        error=error,
        attempt=fact.attempt,
        loop_id=fact.loop_id,
        iter_index=fact.iter_index,
        ctx=fact.ctx,
        duration_ms=fact.duration_ms,
    )


def _judged_failed(
    playbook: Playbook, state: ExecutionState, fact: CallFailed, event_id: EventId, known: Known
) -> CallFailed:
    step = playbook.steps[fact.step]
    command = state.commands[fact.command_id]
    rule = step.retry.on_error or _shard_rule(_loop(state, command))
    failures = command.failures + 1
    if rule is None or failures >= rule.max_attempts:
        return fact
    try:
        if not _is_worth_it(
            rule, fact, _Names(playbook, state, step, command, fact.result, fact.error, known)
        ):
            return fact
    except TemplateError as error:
        details = {**fact.error.details, "while_handling": as_recorded(str(error))}
        worse = msgspec.structs.replace(fact.error, details=details)
        return msgspec.structs.replace(fact, error=worse)
    again = msgspec.structs.replace(
        after_loss(command), failures=failures, delay_s=_delay(rule, fact, state, failures)
    )
    if rule.circuit is not None:
        again = _through_circuit(rule.circuit, again, state, fact, minted_at_ms(event_id))
    return msgspec.structs.replace(fact, again=again)


def _shard_rule(loop: LoopState | None) -> OnError | None:
    """A shard that fails is tried again by itself, without the loop knowing."""
    if loop is None or not loop.is_fanout or not loop.shard_retries_max:
        return None
    return OnError(max_attempts=loop.shard_retries_max + 1, backoff="fixed", initial_delay=0.0)


def _is_worth_it(rule: OnError, fact: CallFailed, names: "_Names") -> bool:
    if rule.when is None:
        return fact.error.kind not in _NEVER_BETTER
    return names.holds(rule.when, "retry.on_error.when")


def _delay(rule: OnError, fact: CallFailed, state: ExecutionState, failures: int) -> float:
    """A server that says when to come back is believed, up to a day."""
    delay = rule.initial_delay
    if rule.backoff == "linear":
        delay *= failures
    elif rule.backoff == "exponential":
        delay *= 2.0 ** min(failures - 1, 30)
    delay = min(delay, rule.max_delay)
    if rule.jitter:
        # The same for every replay of this attempt, and different for its neighbours.
        draw = crc32(f"{state.execution_id}:{fact.command_id}".encode()) / 2**32
        delay *= 1.0 - JITTER_SHARE * draw
    asked = fact.error.details.get("retry_after", 0.0)
    asked = asked if isinstance(asked, int | float) else 0.0
    return float(min(DELAY_SECONDS_MAX, max(delay, asked)))


def _through_circuit(
    circuit: Circuit, again: Again, state: ExecutionState, fact: CallFailed, now_ms: int
) -> Again:
    step = state.steps[fact.step]
    since = now_ms - circuit.window_s * 1000
    recent = sum(at > since for at in step.failed_at_ms) + 1
    open_until_ms = step.open_until_ms
    if recent >= circuit.failures:
        open_until_ms = max(open_until_ms, now_ms + int(circuit.open_s * 1000))
    return msgspec.structs.replace(
        again,
        delay_s=max(again.delay_s, (open_until_ms - now_ms) / 1000),
        failures_watched=circuit.failures,
        open_until_ms=open_until_ms,
    )


def _as_shard(state: ExecutionState, fact: CallDone | CallFailed) -> CallDone | CallFailed:
    """What ends an item of a fan-out has a name of its own."""
    loop = _loop(state, state.commands[fact.command_id])
    if loop is None or not loop.is_fanout or fact.again is not None:
        return fact
    kind = ShardDone if isinstance(fact, CallDone) else ShardFailed
    return kind(**msgspec.structs.asdict(fact))


def _loop(state: ExecutionState, command: OpenCommand) -> LoopState | None:
    return state.visits[visit_id(command.step, command.visit)].loop


class _Names:
    """What the guards of `retry` can read: the answer, and the item of the loop."""

    def __init__(
        self,
        playbook: Playbook,
        state: ExecutionState,
        step: Step,
        command: OpenCommand,
        envelope: Envelope,
        error: ToolError | None,
        known: Known,
    ) -> None:
        self._step = step
        self._command = command
        self._state = state
        self._known = known
        output = loaded_view(
            envelope, known.document, paths=pushed_paths(playbook, step.step), error=error
        )
        roots = {
            "response": output,
            "output": output,
            "outcome": output,
            "error": error_view(error),
            "_attempt": command.attempt,
        }
        self._scope = partial(scope_of, playbook, state, known, ctx=state.ctx, roots=roots)

    def holds(self, guard: str, field: str) -> bool:
        return is_true(guard, self._names(guard), step=self._step.step, field=field)

    def rendered(self, values: Mapping[str, Any], field: str) -> dict[str, Any]:
        if not values:
            return {}
        names = self._names(values)
        return render_recorded(values, names, step=self._step.step, field=field)

    def _names(self, value: Any) -> Scope:
        return self._scope(iterator=self._iterator(value))

    def _iterator(self, value: Any) -> dict[str, Any]:
        """Loaded only for templates that read it: it may be large."""
        loop, index = _loop(self._state, self._command), self._command.index
        own = self._step.loop
        if loop is None or own is None or index is None or loop.is_cursor:
            return {}
        if not _reads(value, {"iter", own.iterator}):
            return {}
        element = element_of(loop, index, self._known)
        total = loop.base_done + loop.total
        return iterator_names(own.iterator, element, index=index, total=total)


def _reads(value: Any, names: set[str]) -> bool:
    if isinstance(value, str):
        return bool(names & compile_template(value).roots)
    if isinstance(value, Mapping):
        return any(_reads(item, names) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_reads(item, names) for item in value)
    return False
