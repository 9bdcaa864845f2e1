"""Where tokens go: what a step sets, which arcs are taken, when a barrier opens.

Order at the end of a step: its `set`, then its arcs in order, then the `set` of each arc taken. A
guard that raises fails the step. On a failure only arcs whose guard looks at it are asked, and one
that raises then is not taken: a failure is never hidden by another.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

import msgspec

from noetl_core.domain.analysis import pushed_paths
from noetl_core.domain.ctx import RECORDED_BYTES_MAX, as_recorded, compose, merge_ctx
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import TemplateError, ToolError
from noetl_core.domain.events import CallPartial, Chunk, Hop, StepExited, StepFailed, StepSkipped
from noetl_core.domain.graph import graph_of
from noetl_core.domain.ids import StepName, visit_id
from noetl_core.domain.known import Known
from noetl_core.domain.playbook import Arc, Playbook, Step
from noetl_core.domain.result_view import error_view, plain
from noetl_core.domain.scope import (
    EMPTY,
    Scope,
    StepViews,
    event_root,
    loaded_view,
    workload_of,
)
from noetl_core.domain.state import ExecutionState
from noetl_core.domain.template import compile_template, is_true, render

_FAILURE_ROOTS = frozenset({"event", "error", "output", "outcome", "fanin"})


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a visit of a step ended, or what a chunk of its result is."""

    envelope: Envelope
    error: ToolError | None = None
    event_name: str = "call.done"
    fanin: dict[str, Any] = {}


class _Choice(msgspec.Struct):
    hops: list[Hop] = []
    ctx: dict[str, Any] = {}


class _Routing:
    """The evaluation of one step's end; the context grows as `set` blocks are applied."""

    def __init__(
        self,
        playbook: Playbook,
        state: ExecutionState,
        step: Step,
        outcome: Outcome,
        known: Known,
        *,
        chunk: Chunk | None = None,
    ) -> None:
        self.playbook = playbook
        self._chunk = chunk
        self.step = step
        self._state = state
        self._outcome = outcome
        self._known = known
        self._ctx: dict[str, Any] = dict(state.ctx)
        self._choice = _Choice()

    @cached_property
    def _names(self) -> Scope:
        """Made when the first template asks: a step without any pays nothing."""
        return scope_of(
            self.playbook,
            self._state,
            self._known,
            ctx=self._ctx,
            roots=self._roots(),
            chunk=self._chunk,
        )

    def _roots(self) -> dict[str, Any]:
        outcome = self._outcome
        output = loaded_view(
            outcome.envelope,
            self._known.document,
            paths=pushed_paths(self.playbook, self.step.step),
            error=outcome.error,
        )
        name = outcome.event_name if outcome.error is None else "step.failed"
        return {
            "output": output,
            "outcome": output,
            "event": event_root(name, self.step.step),
            "error": error_view(outcome.error),
            "fanin": outcome.fanin,
            self.step.step: output,
        }

    def after_success(self) -> _Choice:
        self._set(self.step.set, "set")
        self._take(self._true_arcs())
        if not self._choice.hops:
            self._nothing_matched()
        return self._choice

    def after_failure(self) -> _Choice:
        self._take(self._failure_arcs())
        return self._choice

    def after_chunk(self) -> _Choice:
        """Every arc for chunks is a branch of its own: the mode of `next` is about the end."""
        arcs = [(n, a) for n, a in enumerate(self.step.next.arcs) if a.on == "call.partial"]
        self._follow([(n, a) for n, a in arcs if a.when is None or self._holds(n, a)])
        return self._choice

    def _arcs(self) -> Iterator[tuple[int, Arc]]:
        return ((n, arc) for n, arc in enumerate(self.step.next.arcs) if arc.on is None)

    def _true_arcs(self) -> Iterator[tuple[int, Arc]]:
        for number, arc in self._arcs():
            if arc.when is None or self._holds(number, arc):
                yield number, arc

    def _failure_arcs(self) -> Iterator[tuple[int, Arc]]:
        for number, arc in self._arcs():
            if arc.when is None or not _FAILURE_ROOTS & compile_template(arc.when).roots:
                continue
            try:
                taken = self._holds(number, arc)
            except TemplateError:
                continue
            if taken:
                yield number, arc

    def _holds(self, number: int, arc: Arc) -> bool:
        field = f"next.arcs[{number}].when"
        return is_true(arc.when, self._names, step=self.step.step, field=field)

    def _take(self, arcs: Iterator[tuple[int, Arc]]) -> None:
        """All guards are asked before the first arc sets anything: none sees what another sets."""
        only_first = self.step.next.spec.mode == "exclusive"
        self._follow(list(islice(arcs, 1 if only_first else None)))

    def _follow(self, arcs: list[tuple[int, Arc]]) -> None:
        graph = graph_of(self.playbook)
        for number, arc in arcs:
            field = f"next.arcs[{number}]"
            self._set(arc.set, f"{field}.set")
            given = self._recorded(arc.input, f"{field}.input")
            self._choice.hops.append(
                Hop(step=arc.step, barrier=graph.is_barrier(arc.step), input=given)
            )

    def _recorded(self, values: Mapping[str, Any], field: str) -> dict[str, Any]:
        if not values:
            return {}
        return render_recorded(values, self._names, step=self.step.step, field=field)

    def _set(self, values: Mapping[str, Any], field: str) -> None:
        """Evaluated together, then applied: the keys of one block do not see each other."""
        recorded = self._recorded(values, field)
        if recorded:
            patch = {key.removeprefix("ctx."): value for key, value in recorded.items()}
            merge_ctx(self._ctx, patch)
            self._choice.ctx = compose(self._choice.ctx, patch)

    def _nothing_matched(self) -> None:
        spec = self.playbook.executor.spec
        if self.step.next.arcs and self.step.next.spec.on_no_match == "fail":
            reason = "no arc matched, and `on_no_match` is `fail`"
            raise TemplateError(reason, step=self.step.step, field="next.arcs")
        if spec.no_next_is_error and not self.step.next.arcs and self.step.step != spec.final_step:
            reason = "the step has no `next`, and `no_next_is_error` is set"
            raise TemplateError(reason, step=self.step.step, field="next")


def render_recorded(
    values: Mapping[str, Any], names: Scope, *, step: str, field: str
) -> dict[str, Any]:
    """The values as the log will give them back: what follows must not see anything else."""
    rendered = plain(render(dict(values), names, step=step, field=field))
    try:
        recorded: dict[str, Any] = as_recorded(rendered)
    except (TypeError, ValueError) as error:
        reason = f"it gives what is no data: {error}"
        raise TemplateError(reason, step=step, field=field) from error
    size = len(msgspec.json.encode(recorded))
    if size > RECORDED_BYTES_MAX:
        raise TemplateError(
            f"it gives {size} bytes, more than {RECORDED_BYTES_MAX}: "
            "keep the data in the step's result and refer to the step instead",
            step=step,
            field=field,
        )
    return recorded


def leave(
    playbook: Playbook,
    state: ExecutionState,
    name: StepName,
    visit: int,
    outcome: Outcome,
    known: Known,
) -> StepExited | StepFailed:
    """How the step is left and which way its token goes."""
    step = playbook.steps[name]
    chunk = state.visits[visit_id(name, visit)].chunk
    error = outcome.error
    if error is None:
        kind = StepSkipped if outcome.event_name == "step.skipped" else StepExited
        try:
            routing = _Routing(playbook, state, step, outcome, known, chunk=chunk)
            choice = routing.after_success()
            return kind(
                step=name,
                visit=visit,
                result=outcome.envelope,
                hops=tuple(choice.hops),
                ctx=choice.ctx,
            )
        except TemplateError as failed:
            error = template_failure(failed)
    envelope = msgspec.structs.replace(outcome.envelope, status="error")
    outcome = msgspec.structs.replace(outcome, error=error, envelope=envelope)
    return _left_by_failure(playbook, state, step, visit, outcome, error, known)


def _left_by_failure(
    playbook: Playbook,
    state: ExecutionState,
    step: Step,
    visit: int,
    outcome: Outcome,
    error: ToolError,
    known: Known,
) -> StepFailed:
    try:
        chunk = state.visits[visit_id(step.step, visit)].chunk
        choice = _Routing(playbook, state, step, outcome, known, chunk=chunk).after_failure()
    except TemplateError as failed:
        choice = _Choice()
        error = msgspec.structs.replace(
            error, details={**error.details, "while_handling": as_recorded(str(failed))}
        )
    return StepFailed(
        step=step.step,
        visit=visit,
        result=outcome.envelope,
        error=error,
        hops=tuple(choice.hops),
        ctx=choice.ctx,
        handled=bool(choice.hops),
    )


def send_chunk(
    playbook: Playbook, state: ExecutionState, fact: CallPartial, known: Known
) -> CallPartial:
    """The chunk with the ways that its tokens go. Raises TemplateError for a guard that does."""
    outcome = Outcome(envelope=fact.result, event_name="call.partial")
    choice = _Routing(playbook, state, playbook.steps[fact.step], outcome, known).after_chunk()
    return msgspec.structs.replace(fact, hops=tuple(choice.hops), ctx=choice.ctx)


def is_admitted(
    playbook: Playbook,
    state: ExecutionState,
    step: Step,
    known: Known,
    *,
    given: Mapping[str, Any] = EMPTY,
    chunk: Chunk | None = None,
) -> bool:
    """What the first admission rule that holds says; without any, yes."""
    rules = step.spec.policy.admit
    if not rules:
        return True
    names = scope_of(playbook, state, known, ctx=state.ctx, given=given, chunk=chunk)
    for number, rule in enumerate(rules):
        field = f"spec.policy.admit.rules[{number}].when"
        if rule.when is None or is_true(rule.when, names, step=step.step, field=field):
            return rule.allow
    return True


def loop_collection(
    playbook: Playbook,
    state: ExecutionState,
    step: Step,
    known: Known,
    *,
    given: Mapping[str, Any] = EMPTY,
    chunk: Chunk | None = None,
) -> Any:
    """What `loop.in` gives: a list if the playbook is right. `given`: what the arc brought."""
    assert step.loop is not None, step.step
    names = scope_of(playbook, state, known, ctx=state.ctx, given=given, chunk=chunk)
    value = plain(render(step.loop.collection, names, step=step.step, field="loop.in"))
    return list(value) if isinstance(value, tuple | range) else value


def ready_barriers(playbook: Playbook, state: ExecutionState) -> list[StepName]:
    """Barriers with tokens waiting that no other live token can still reach."""
    graph = graph_of(playbook)
    live = {visit.step for visit in state.visits.values()} | state.arrivals.keys()
    return [
        step
        for step in sorted(state.arrivals)  # a state that was stored has lost the order of its keys
        if graph.is_barrier(step)
        and not any(graph.reaches(other, step) for other in live if other != step)
    ]


def scope_of(
    playbook: Playbook,
    state: ExecutionState,
    known: Known,
    *,
    ctx: Mapping[str, Any],
    roots: Mapping[str, Any] | None = None,
    iterator: Mapping[str, Any] = EMPTY,
    given: Mapping[str, Any] = EMPTY,
    chunk: Chunk | None = None,
) -> Scope:
    """The names of templates that the broker evaluates. To a token with a chunk, the step that it
    comes from means that chunk."""
    results = {name: s.result for name, s in state.steps.items() if s.result is not None}
    if chunk is not None:
        results[chunk.step] = chunk.result
    return Scope(
        workload=workload_of(playbook.workload, state.payload, known.document),
        ctx=ctx,
        steps=StepViews(
            results,
            known.document,
            paths={name: pushed_paths(playbook, name) for name in results},
            errors={n: s.error for n in results if (s := state.steps[n]).error is not None},
        ),
        iterator=iterator,
        input=given,
        roots={"execution_id": str(state.execution_id), **(roots or {})},
    )


def template_failure(error: TemplateError) -> ToolError:
    return ToolError(
        kind="template_rendering",
        message=as_recorded(str(error)),
        details={"step": error.step, "field": error.field, "name": error.name},
    )
