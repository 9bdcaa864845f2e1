"""The names of one command: what its templates can read, and what its tasks have set so far.

Results of other steps and credentials are loaded when a template first reads them: rendering
stops, says what it needs, and is done again with that at hand. Rendering has no effects, so doing
it twice is doing it once.
"""

import copy
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from noetl_core.domain.brief import Brief
from noetl_core.domain.ctx import as_recorded, compose, merge_ctx
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import NoetlError, ReferenceNeeded, ToolError
from noetl_core.domain.ids import CommandId, ExecutionId
from noetl_core.domain.merge import deep_merge
from noetl_core.domain.result_view import error_view, plain, view_of
from noetl_core.domain.scope import EMPTY, Scope, StepViews, iterator_names, workload_of
from noetl_core.domain.template import is_true, render
from noetl_worker.plan import Rendering, StepPlan, TaskPlan
from noetl_worker.tools.tool import Credential, ToolFailedError, idempotency_key

_OK = Envelope(status="ok")
_FAILED = Envelope(status="error")

Load = Callable[[Reference], Awaitable[Any]]
Open = Callable[[str], Awaitable[Credential]]


class CredentialNeeded(NoetlError):  # noqa: N818 - a request, not a failure
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Names:
    def __init__(
        self,
        plan: StepPlan,
        brief: Brief,
        element: Any,
        *,
        execution_id: ExecutionId,
        command_id: CommandId,
        load: Load,
        open_credential: Open,
    ) -> None:
        self._plan = plan
        self._brief = brief
        self._load = load
        self._open = open_credential
        self._documents: dict[Reference, Any] = {}
        self._keychain = Keychain()
        self._ctx = brief.ctx
        self._local: dict[str, Any] = {}
        self._results: dict[str, Any] = {}
        self._execution_id = execution_id
        self._roots: dict[str, Any] = {
            "execution_id": str(execution_id),
            "idempotency_key": idempotency_key(execution_id, command_id),
            "results": self._results,
            "_prev": None,
            "now": _now,
            "uuid": _uuid,
        }
        self._iterator = _iterator(plan, brief, element)
        self.element: dict[str, Any] = {}
        """The element of the loop under its name."""
        if plan.step.loop is not None and plan.step.loop.iterator in self._iterator:
            self.element = {plan.step.loop.iterator: element}
        self.ctx_patch: dict[str, Any] = {}
        """What was set in ctx, by dotted path below it."""

    def of_rows(self, element: Any, *, index: int, total: int, command_id: CommandId) -> "Names":
        """The names of one run of the pipeline over rows that a cursor loop has claimed.

        What was loaded is shared with it, and so are the secrets; what it sets is its own.
        """
        loop = self._plan.step.loop
        assert loop is not None, self._plan.step.step
        names = copy.copy(self)
        names._ctx = dict(self._ctx)
        names.ctx_patch = {}
        names._local, names._results = {}, {}
        names._roots = {
            **self._roots,
            "idempotency_key": idempotency_key(self._execution_id, command_id),
            "results": names._results,
        }
        names._iterator = {
            **iterator_names(loop.iterator, element, index=index, total=total),
            **_parent(self._brief),
        }
        names.element = {loop.iterator: element}
        return names

    def absorb(self, patch: dict[str, Any]) -> None:
        """What rows have set in ctx, in their order."""
        merge_ctx(self._ctx, patch)
        self.ctx_patch = compose(self.ctx_patch, patch)

    @property
    def iterator(self) -> Mapping[str, Any]:
        """`iter.*` as it is now; empty outside a loop."""
        return self._iterator

    @property
    def secrets(self) -> set[str]:
        """What must not show up in anything that leaves this process."""
        return self._keychain.secrets

    async def credential(self, name: str) -> Credential:
        opened = await self._open(name)
        self._keychain.add(opened)
        return opened

    async def step_input(self) -> Mapping[str, Any]:
        """`input.*` of the step: its own, and what the arc has brought goes over it."""
        return await self._input(self._plan.input)

    async def claim_input(self) -> Mapping[str, Any]:
        """Before a cursor loop has claimed anything: what does not read the rows."""
        return await self._input(self._plan.claim_input)

    async def _input(self, piece: Rendering) -> Mapping[str, Any]:
        brought = self._brief.input
        if not brought:
            return await self.rendered(piece)
        # What the arc has brought may be all there is: the step's own is then not even rendered.
        own = {name: value for name, value in piece.value.items() if name not in brought}
        return {**await self.rendered(piece._replace(value=own)), **brought}

    async def task_input(self, task: TaskPlan, step_input: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a task is given: the step's input, its own over it, and the next page's over all."""
        own = await self.rendered(task.input, step_input)
        paged = self._call_of(task).get("input")
        if not own and not paged:
            return step_input
        return deep_merge({**step_input, **own}, paged) if paged else {**step_input, **own}

    async def task_config(self, task: TaskPlan, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields of a task's tool, with the call of the next page over them."""
        config: Mapping[str, Any] = await self.rendered(task.config, given, with_keychain=True)
        if task.raw:
            config = {**config, **task.raw}
        paged = {name: value for name, value in self._call_of(task).items() if name != "input"}
        return deep_merge(config, paged) if paged else config

    def _call_of(self, task: TaskPlan) -> Mapping[str, Any]:
        """What goes over the call of this task; in a pipeline it stands under the task's label."""
        call = self._brief.call
        if not call or len(self._plan.tasks) == 1:
            return call
        of_task = call.get(task.task.label)
        return of_task if isinstance(of_task, Mapping) else EMPTY

    def begin_claim(self) -> None:
        """What the claim of a cursor loop is told."""
        assert self._plan.step.loop is not None, self._plan.step.step
        frame = self._plan.step.loop.spec.frame
        self._roots["__frame_max_rows"] = frame.max_rows
        self._roots["__frame_lease_seconds"] = frame.lease_seconds

    async def rendered(
        self, piece: Rendering, given: Mapping[str, Any] = EMPTY, *, with_keychain: bool = False
    ) -> dict[str, Any]:
        """The piece as plain data; itself when there is no template in it."""
        if not piece.is_templated:
            return piece.value
        scope = self._scope(given, with_keychain=with_keychain)
        step = self._plan.step.step
        value: dict[str, Any] = await self._with_all_it_needs(
            lambda: plain(render(piece.value, scope, step=step, field=piece.field))
        )
        return value

    async def holds(self, guard: str, given: Mapping[str, Any], field: str) -> bool:
        scope = self._scope(given)
        step = self._plan.step.step
        answer: bool = await self._with_all_it_needs(
            lambda: is_true(guard, scope, step=step, field=field)
        )
        return answer

    def begin(self, label: str, attempt: int) -> None:
        """A new attempt: `output` is nothing again until it has one."""
        for name in ("output", "outcome", "error"):
            self._roots.pop(name, None)
        self._roots["_task"] = label
        self._roots["_attempt"] = attempt

    def look_at(self, document: Any, error: ToolError | None) -> None:
        """From here on `output` is this result."""
        output = view_of(_OK if error is None else _FAILED, document, error=error)
        self._roots["output"] = self._roots["outcome"] = output
        self._roots["error"] = error_view(error)

    def finish(self, label: str, data: Any, error: ToolError | None) -> None:
        view = view_of(_OK if error is None else _FAILED, data, error=error)
        self._local[label] = self._results[label] = self._roots["_prev"] = view

    def apply(self, values: Mapping[str, Any]) -> None:
        """`{ctx.a: 1, iter.b: 2}`: ctx goes to the execution, iter stays with this command."""
        for key, value in values.items():
            root, _, path = key.partition(".")
            if root == "iter":
                merge_ctx(self._iterator, {path: value})
            else:
                # What we go on with is what the log will hold, to the last character.
                patch = {path: _recorded(value, key)}
                merge_ctx(self._ctx, patch)
                self.ctx_patch = compose(self.ctx_patch, patch)

    def _scope(self, given: Mapping[str, Any], *, with_keychain: bool = False) -> Scope:
        brief, roots = self._brief, self._roots
        return Scope(
            workload=workload_of(self._plan.playbook.workload, brief.payload, self._document),
            ctx=self._ctx,
            steps=StepViews(brief.steps, self._document, errors=brief.errors)
            if brief.steps
            else EMPTY,
            local=self._local,
            iterator=self._iterator,
            input=given,
            roots={**roots, "keychain": self._keychain} if with_keychain else roots,
        )

    def _document(self, envelope: Envelope) -> Any:
        reference = envelope.reference
        if reference is None:
            return None
        if reference not in self._documents:
            raise ReferenceNeeded(reference)
        return self._documents[reference]

    async def _with_all_it_needs(self, attempt: Callable[[], Any]) -> Any:
        # Every round loads something that was missing, and there is only so much to load.
        while True:
            try:
                return attempt()
            except ReferenceNeeded as needed:
                await self._load_what_is(needed)
            except CredentialNeeded as needed:
                await self.credential(needed.name)

    async def _load_what_is(self, needed: ReferenceNeeded) -> None:
        assert needed.reference is not None, needed
        self._documents[needed.reference] = await self._load(needed.reference)


class Keychain(Mapping[str, Any]):
    """`keychain.<name>.<field>`. A credential is opened when a template names it."""

    def __init__(self) -> None:
        self._opened: dict[str, Mapping[str, Any]] = {}
        self.secrets: set[str] = set()

    def add(self, credential: Credential) -> None:
        self._opened[credential.name] = credential.data
        self.secrets.update(_texts(credential.data))

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        if name not in self._opened:
            raise CredentialNeeded(name)
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened)

    def __len__(self) -> int:
        return len(self._opened)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)


def _iterator(plan: StepPlan, brief: Brief, element: Any) -> dict[str, Any]:
    loop, where = plan.step.loop, brief.element
    if loop is None or where is None:
        return _parent(brief)
    if loop.cursor is not None:
        return {"index": where.index, **_parent(brief)}  # of the frame: there are no rows yet
    names = iterator_names(loop.iterator, element, index=where.index, total=where.total)
    return {**names, **_parent(brief)}


def _parent(brief: Brief) -> dict[str, Any]:
    """The iteration in which another playbook has called this one."""
    return {"parent": brief.iter_parent} if brief.iter_parent else {}


def _recorded(value: Any, key: str) -> Any:
    try:
        return as_recorded(value)
    except (TypeError, ValueError) as error:
        message = f"`set` of {key} gives what is no plain data: {error}"
        raise ToolFailedError(ToolError(kind="parse", code="NOT_JSON", message=message)) from error


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _uuid() -> str:
    return str(uuid.uuid4())
