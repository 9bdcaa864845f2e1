"""What a name in a template means: the look-up order of bare names, and the named roots.

Bare names are looked for in the input, the iterator, the locals of a pipeline, the results of
steps, `ctx` and the workload, in this order. Named roots (`workload`, `ctx`, `iter`, `output`, ...)
come before all of them. Everything is looked up when it is read: a result that no template reads is
never loaded.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ReferenceNeeded, ToolError
from noetl_core.domain.merge import deep_merge
from noetl_core.domain.result_view import MISSING, EventName, PartialView, view_of

EMPTY: Mapping[str, Any] = {}

Lazy = Callable[[], Mapping[str, Any]]
"""A part of the scope that may have to be loaded first: it may raise ReferenceNeeded."""


_ITERATION = frozenset({"index", "first", "last", "parent"})
"""Read as `iter.index` only: bare, they would hide names of the user's own."""


class Scope(Mapping[str, Any]):
    """Names to values, looked up when asked for."""

    __slots__ = ("_ctx", "_input", "_iterator", "_locals", "_roots", "_steps", "_workload")

    def __init__(
        self,
        *,
        workload: Mapping[str, Any] | Lazy = EMPTY,
        ctx: Mapping[str, Any] = EMPTY,
        steps: Mapping[str, Any] = EMPTY,
        local: Mapping[str, Any] = EMPTY,
        iterator: Mapping[str, Any] = EMPTY,
        input: Mapping[str, Any] = EMPTY,  # noqa: A002 - the language's own word
        roots: Mapping[str, Any] = EMPTY,
    ) -> None:
        self._workload = workload
        self._ctx = ctx
        self._steps = steps
        self._locals = local
        self._iterator = iterator
        self._input = input
        self._roots = roots

    def __getitem__(self, name: str) -> Any:
        if name in self._roots:
            return self._roots[name]
        named = self._named(name)
        if named is not None:
            return named
        for names in self._layers():
            if name in names and not (names is self._iterator and name in _ITERATION):
                return names[name]
        return self.workload[name]

    def _named(self, name: str) -> Mapping[str, Any] | None:
        match name:
            case "ctx":
                return self._ctx
            case "iter":
                return self._iterator
            case "input":
                return self._input
            case "workload":
                return self.workload
            case _:
                return None

    @property
    def workload(self) -> Mapping[str, Any]:
        if callable(self._workload):
            self._workload = self._workload()
        return self._workload

    def __contains__(self, name: object) -> bool:
        try:
            self[str(name)]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        seen: dict[str, None] = dict.fromkeys(("workload", "ctx", "iter", "input", *self._roots))
        for names in (*self._layers(), self.workload):
            seen.update(dict.fromkeys(names))
        return iter(seen)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _layers(self) -> tuple[Mapping[str, Any], ...]:
        return (self._input, self._iterator, self._locals, self._steps, self._ctx)


class StepViews(Mapping[str, Any]):
    """The results of steps by name. A payload is asked for only when a template reads into it."""

    __slots__ = ("_document", "_envelopes", "_errors", "_paths", "_views")

    def __init__(
        self,
        envelopes: Mapping[Any, Envelope],
        document: Callable[[Envelope], Any],
        *,
        paths: Mapping[Any, Collection[str]] = EMPTY,
        errors: Mapping[Any, ToolError] = EMPTY,
    ) -> None:
        """`document` gives the payload behind an envelope, or raises ReferenceNeeded.

        `paths`: by step, every dotted path below its result that templates read.
        """
        self._envelopes = envelopes
        self._document = document
        self._paths = paths
        self._errors = errors
        self._views: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        view = self._views.get(name)
        # One without its payload is made anew: by the next look the payload may be here.
        if view is None or isinstance(view, PartialView):
            view = self._views[name] = loaded_view(
                self._envelopes[name],
                self._document,
                paths=self._paths.get(name, ()),
                error=self._errors.get(name),
            )
        return view

    def __contains__(self, name: object) -> bool:
        return name in self._envelopes

    def __iter__(self) -> Iterator[str]:
        return iter(self._envelopes)

    def __len__(self) -> int:
        return len(self._envelopes)


def loaded_view(
    envelope: Envelope,
    document: Callable[[Envelope], Any],
    *,
    paths: Collection[str] = (),
    error: ToolError | None = None,
) -> Any:
    """The view of a result with its payload if that is at hand, else with what was pushed."""
    try:
        found = document(envelope)
    except ReferenceNeeded:
        found = MISSING
    return view_of(envelope, found, paths=paths, error=error)


def workload_of(
    defaults: Mapping[str, Any],
    payload: Envelope | None,
    document: Callable[[Envelope], Any],
) -> Lazy:
    """The playbook's workload with the request's payload merged over it, when it is first read."""

    def merged() -> Mapping[str, Any]:
        given = None if payload is None else document(payload)
        return deep_merge(defaults, given) if given else defaults

    return merged


def event_root(name: str, step: str) -> dict[str, Any]:
    """`event.*` in a guard."""
    return {"name": EventName(name), "step": step}


def iterator_names(name: str, element: Any, *, index: int, total: int) -> dict[str, Any]:
    """`iter.*` of one iteration, and the bare name of its element."""
    return {
        name: element,
        "index": index,
        "first": index == 0,
        "last": index == total - 1,
    }
