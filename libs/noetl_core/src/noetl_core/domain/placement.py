"""Which worker a command is meant for, and what a worker must have to take it. Pure.

`target` is decided when the command is issued, from the workers that are known to live then, and it
stands in `command.issued`: a replay needs neither the clock nor the table of workers. It is a wish,
not a condition. When its time is over, any worker of the pool may take the command.

What a command `requires` is a condition. A worker that does not offer it never gets the command.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from noetl_core.domain.brief import element_of
from noetl_core.domain.errors import TemplateError
from noetl_core.domain.events import AnyFact, CommandExpired, CommandIssued
from noetl_core.domain.fold import loop_of
from noetl_core.domain.ids import StepName, WorkerId, visit_id, worker_id_of
from noetl_core.domain.known import Known
from noetl_core.domain.playbook import Placement, Playbook, Step, per_playbook
from noetl_core.domain.result_view import plain
from noetl_core.domain.route import scope_of
from noetl_core.domain.scope import Scope, iterator_names
from noetl_core.domain.state import ExecutionState
from noetl_core.domain.template import render
from noetl_core.domain.tools import is_plugin_kind
from noetl_core.domain.workers import LiveWorker, Workers, label_offer, tool_offer

KEY_LENGTH_MAX = 1024


class Needs(NamedTuple):
    """What the workers of a step must have, whatever they are."""

    requires: frozenset[str]
    kinds: frozenset[str]


def needs_of(playbook: Playbook, step: StepName) -> Needs:
    return _all_needs(playbook)[step]


def requires_of(playbook: Playbook, step: StepName, workers: Workers) -> frozenset[str]:
    """What a worker must offer at the moment when it takes a command of the step.

    Labels and tools of other packages always count. A tool that every worker has counts only where
    some worker limits it: the queue must know then which commands that worker cannot take now.
    """
    needs = needs_of(playbook, step)
    limited = workers.limited & needs.kinds
    if not limited:
        return needs.requires
    return needs.requires | {tool_offer(kind) for kind in limited}


@per_playbook
def _all_needs(playbook: Playbook) -> dict[StepName, Needs]:
    return {name: _needs(step) for name, step in playbook.steps.items()}


def _needs(step: Step) -> Needs:
    labels = step.spec.placement.labels if step.spec.placement is not None else {}
    kinds = frozenset(task.kind for task in step.tool)
    of_labels = {label_offer(name, value) for name, value in labels.items()}
    of_tools = {tool_offer(kind) for kind in kinds if is_plugin_kind(kind)}
    return Needs(frozenset(of_labels | of_tools), kinds)


def targeted(
    playbook: Playbook,
    state: ExecutionState,
    issued: CommandIssued,
    known: Known,
    *,
    after: AnyFact | None = None,
) -> CommandIssued:
    """The command with the worker it is meant for. Raises TemplateError and ReferenceNeeded.

    One that is known to be gone is not waited for.

    `after`: what it follows. A command that was lost with its worker is for anybody at once: its
    target may be what is wrong, and nobody waits twice for the same dead worker.
    """
    placement = playbook.steps[issued.step].spec.placement
    if placement is None or isinstance(after, CommandExpired):
        return issued
    target = _target(playbook, state, placement, issued, known)
    if target is None or known.workers.is_gone(target):
        return issued
    return msgspec.structs.replace(issued, target_worker=target, target_s=placement.wait_s)


def _target(
    playbook: Playbook,
    state: ExecutionState,
    placement: Placement,
    issued: CommandIssued,
    known: Known,
) -> WorkerId | None:
    if placement.affinity == "previous":
        return known.previous
    for field, template in (("worker", placement.worker), ("affinity", placement.affinity)):
        if template is None:
            continue
        names = _names(playbook, state, issued, known)
        text = _text(template, names, issued.step, f"spec.placement.{field}")
        if not text:
            return None
        if field == "worker":
            return worker_id_of(text)
        requires = requires_of(playbook, issued.step, known.workers)
        return nearest_worker(text, known.workers.able(issued.pool, requires))
    return None


def _text(template: str, names: Scope, step: str, field: str) -> str:
    value = plain(render(template, names, step=step, field=field))
    if value is None:
        return ""
    if isinstance(value, Mapping | list):
        reason = f"it gives {type(value).__name__}, not a name or a key"
        raise TemplateError(reason, step=step, field=field)
    return str(value).strip()[:KEY_LENGTH_MAX]


def _names(playbook: Playbook, state: ExecutionState, issued: CommandIssued, known: Known) -> Scope:
    return scope_of(
        playbook,
        state,
        known,
        ctx=state.ctx,
        given=state.visits[visit_id(issued.step, issued.visit)].input,
        iterator=_iterator(playbook, state, issued, known),
    )


def _iterator(
    playbook: Playbook, state: ExecutionState, issued: CommandIssued, known: Known
) -> dict[str, Any]:
    own, index = playbook.steps[issued.step].loop, issued.iter_index
    if own is None or index is None:
        return {}
    loop = loop_of(state, issued.step, issued.visit)
    if loop.is_cursor:
        return {"index": index}  # there are no rows yet
    element = element_of(loop, index, known)
    return iterator_names(own.iterator, element, index=index, total=loop.base_done + loop.total)


def nearest_worker(key: str, workers: Iterable[LiveWorker]) -> WorkerId | None:
    """The same worker for the same key, as long as it lives; the more slots, the more keys.

    Rendezvous hashing: when a worker comes or goes, only the keys that it gets or had move.
    """
    best = max(workers, key=lambda worker: _weight(key, worker), default=None)
    return None if best is None else best.worker_id


def _weight(key: str, worker: LiveWorker) -> float:
    digest = hashlib.blake2b(f"{worker.worker_id}\0{key}".encode(), digest_size=8).digest()
    draw = (int.from_bytes(digest) + 1) / (2**64 + 2)
    return worker.capacity / -math.log(draw)
