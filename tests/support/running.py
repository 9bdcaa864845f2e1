"""Playbooks in a line, and an execution that is led by hand: what domain tests are written with.

run = Run(playbook(step("a", arc("b")), step("b")))
run.done("a.1#1")
assert run.said[-2:] == ["step.enter b.1", "command.issued b.1#1"]
"""

import itertools
from typing import Any, Literal, TypeVar

from noetl_broker.accept import ExecutionMessage, accept
from noetl_core.domain.decide import follow
from noetl_core.domain.errors import ReferenceNeeded, ToolError
from noetl_core.domain.events import (
    AnyFact,
    Event,
    StepEntered,
    StepExited,
    StepFailed,
    type_name,
)
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EventId,
    ExecutionId,
    LoopId,
    RefId,
    StepName,
    WorkerId,
    visit_id,
)
from noetl_core.domain.known import Known
from noetl_core.domain.loop import split
from noetl_core.domain.playbook import (
    Arc,
    FailurePolicy,
    Loop,
    LoopSpec,
    Metadata,
    Next,
    NextSpec,
    Playbook,
    Retry,
    Step,
    StepPolicy,
    StepSpec,
    Task,
)
from noetl_core.domain.state import ExecutionState
from noetl_core.wire.messages import (
    Cancel,
    Claimed,
    Done,
    Due,
    Expired,
    Failed,
    Parked,
    Signal,
    Start,
    Stored,
)
from noetl_core.wire.messages import Retry as RetryMessage

EXECUTION = ExecutionId(1)
WORKER = WorkerId("w1")
F = TypeVar("F")
FAILED = "{{ event.name == 'step.failed' }}"


def playbook(*steps: Step, **workload: Any) -> Playbook:
    return Playbook(
        metadata=Metadata(name="test"), workload=workload, steps={s.step: s for s in steps}
    )


def arc(step: str, when: str | None = None, **values: Any) -> Arc:
    return Arc(step=StepName(step), when=when, set={f"ctx.{k}": v for k, v in values.items()})


def step(
    name: str,
    *arcs: Arc | str,
    inclusive: bool = False,
    on_no_match: Literal["complete", "fail"] = "complete",
    join: Literal["any", "all"] | None = None,
    best_effort: bool = False,
    router: bool = False,
    loop: Loop | None = None,
    retry: Retry | None = None,
    spec: StepSpec | None = None,
    kind: str = "noop",
    **values: Any,
) -> Step:
    """A step with a tool; a `router` has none. Keywords that are left over are its `set`."""
    policy = FailurePolicy(mode="best_effort" if best_effort else "fail_fast")
    return Step(
        step=StepName(name),
        spec=spec or StepSpec(join=join, policy=StepPolicy(failure=policy)),
        loop=loop,
        tool=() if router else (Task(label="task_0", kind=kind),),
        retry=retry or Retry(),
        set={f"ctx.{key}": value for key, value in values.items()},
        next=Next(
            spec=NextSpec(mode="inclusive" if inclusive else "exclusive", on_no_match=on_no_match),
            arcs=tuple(arc(a) if isinstance(a, str) else a for a in arcs),
        ),
    )


def loop_over(collection: Any, *, max_in_flight: int = 100, sequential: bool = False) -> Loop:
    mode: Literal["sequential", "parallel"] = "sequential" if sequential else "parallel"
    return Loop(collection=collection, spec=LoopSpec(mode=mode, max_in_flight=max_in_flight))


def fan_out(collection: Any, *, max_in_flight: int = 500) -> Loop:
    return Loop(collection=collection, spec=LoopSpec(mode="fanout", max_in_flight=max_in_flight))


def say(fact: AnyFact) -> str:
    """`command.issued load.1/2#1`: a fact in a few words."""
    name = getattr(fact, "command_id", None)
    visit = getattr(fact, "visit", None)
    if name is None and visit is not None:
        name = visit_id(getattr(fact, "step", ""), visit)
    return type_name(fact) if name is None else f"{type_name(fact)} {name}"


class Run:
    """One execution, started at once. Results are known as soon as they are reported."""

    def __init__(self, playbook: Playbook, start: Start | None = None) -> None:
        self.playbook = playbook
        self.state = ExecutionState(execution_id=EXECUTION)
        self.known = Known()
        self.events: list[Event] = []
        self._ids = itertools.count(1)
        self.take(
            start or Start(execution_id=EXECUTION, catalog_id=CatalogId(7), path="test", version=1)
        )

    @property
    def facts(self) -> list[AnyFact]:
        return [event.fact for event in self.events]

    @property
    def said(self) -> list[str]:
        return [say(fact) for fact in self.facts]

    @property
    def open(self) -> list[str]:
        return list(self.state.commands)

    def entered(self, name: str) -> list[StepEntered]:
        return [f for f in self.facts if isinstance(f, StepEntered) and f.step == name]

    def left(self, name: str) -> StepExited | StepFailed:
        """How the step was left the last time."""
        return [f for f in self.facts if isinstance(f, StepExited | StepFailed) and f.step == name][
            -1
        ]

    def of(self, kind: type[F]) -> list[F]:
        """The facts of a kind, in order."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def done(
        self, *commands: str, value: Any = None, frame_rows: int | None = None, **ctx: Any
    ) -> None:
        for command in commands:
            body = Stored(tier="db", size=0, sha256=b"", inline=b"")
            message = Done(
                execution_id=EXECUTION,
                command_id=CommandId(command),
                worker_id=WORKER,
                stored=body,
                ctx=ctx,
                frame_rows=frame_rows,
            )
            self.take(message, value)

    def fail(self, *commands: str, kind: str = "boom", **details: Any) -> None:
        for command in commands:
            self.take(
                Failed(
                    execution_id=EXECUTION,
                    command_id=CommandId(command),
                    worker_id=WORKER,
                    error=ToolError(kind=kind, message="it failed", details=details),
                )
            )

    def park(self, command: str, kind: Any, **how: Any) -> None:
        self.take(
            Parked(
                execution_id=EXECUTION,
                command_id=CommandId(command),
                worker_id=WORKER,
                kind=kind,
                **how,
            )
        )

    def signal(self, name: str, number: int = 1, **how: Any) -> None:
        self.take(Signal(execution_id=EXECUTION, signal_id=number, name=name, **how))

    def due(self, timer: str) -> None:
        self.take(Due(execution_id=EXECUTION, timer=timer))

    def retry(self, **how: Any) -> None:
        self.take(RetryMessage(execution_id=EXECUTION, **how))

    def claim(self, command: str) -> None:
        self.take(Claimed(execution_id=EXECUTION, command_id=CommandId(command), worker_id=WORKER))

    def expire(self, command: str) -> None:
        self.take(
            Expired(execution_id=EXECUTION, command_id=CommandId(command), reason="lease over")
        )

    def cancel(self) -> None:
        self.take(Cancel(execution_id=EXECUTION))

    def take(self, message: ExecutionMessage, value: Any = None) -> None:
        event_id = EventId(next(self._ids))
        fact = accept(self.state, message, event_id)
        if fact is None:
            return
        self.known.results[RefId(event_id)] = value
        ids = itertools.chain((event_id,), self._ids)
        for item in follow(self.playbook, self.state, fact, self.known, ids):
            assert not isinstance(item, ReferenceNeeded), item
            self.events.append(item.event)
            if item.collection is not None:
                loop_id = LoopId(item.event.event_id)
                for number, part in enumerate(split(item.collection, 500)):
                    self.known.parts[loop_id, number] = part
