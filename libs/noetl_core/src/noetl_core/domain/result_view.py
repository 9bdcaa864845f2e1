"""How templates see the result of a step: one result answers the common spellings.

For a payload `{"rows": [...], "row_count": 2}` all of `s.rows`, `s.data.rows`, `s.command_0.rows`
mean the same rows. What the envelope knows (`status`, `_ref`, `error`, `stats`) is answered without
the payload. Where the payload is not loaded, a value that the worker pushed into `envelope.context`
is used; anything else raises ReferenceNeeded, and the caller loads it and asks again.

A loaded view is the payload itself, a dict or a list that answers a few more names, so `{{ s }}`,
filters and iteration work on it. `plain()` strips that again from whatever leaves a template.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Self

import msgspec

from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ReferenceNeeded, ToolError

STEP_DOCUMENT_MEDIA_TYPE = "application/vnd.noetl.step+json"


class StepDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored result that is more than its value: tasks of a pipeline, attempts, captured output.

    A step with one task that has nothing else to say is stored as its bare value.
    """

    data: Any = None
    task: str = ""
    """The label of the task that gave `data`, in a pipeline; the others are in `earlier`."""
    earlier: dict[str, Any] = {}
    meta: dict[str, Any] = {}

    @property
    def results(self) -> dict[str, Any]:
        """What each task of a pipeline returned, by label."""
        return {**self.earlier, self.task: self.data} if self.task else {}


def value_of(document: Any) -> Any:
    """A stored document as another step, a loop or a person sees it: the value and its tasks."""
    if not isinstance(document, StepDocument):
        return document
    if not document.task:
        return document.data
    if isinstance(document.data, dict):
        return {**document.data, "results": document.results}
    return {"data": document.data, "results": document.results}


class Missing:
    """The payload is not loaded. (None is a payload.)"""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()


def view_of(
    envelope: Envelope,
    document: Any = MISSING,
    *,
    paths: Collection[str] = (),
    error: ToolError | None = None,
    stats: Mapping[str, int] | None = None,
) -> Any:
    """The view of one result. `paths`: every dotted path below it that the caller's templates read.

    Without a document, a path is answered when `envelope.context` has exactly that path; `paths`
    keeps a half-known `s.data` from standing for the whole of it.
    """
    if document is MISSING:
        # A small payload that templates read as a whole was pushed as a whole.
        document = None if envelope.reference is None else envelope.context.get("", MISSING)
    facts = Facts(envelope, document, error, stats)
    if document is MISSING:
        return PartialView(facts, frozenset(paths))
    match facts.data:
        case dict():
            return DictView(facts)
        case list():
            return ListView(facts)
        case _:
            return ScalarView(facts)


def plain(value: Any) -> Any:
    """The value without views: what may be recorded, stored, or handed to a tool."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, DictView | ListView | ScalarView):
        return value.facts.data
    if isinstance(value, PartialView):
        raise value.needed()
    if isinstance(value, dict):
        return _plain_items(value, value.items(), dict)
    if isinstance(value, list | tuple):
        return _plain_items(value, enumerate(value), list)
    if isinstance(value, str):
        return str.__str__(value)
    return value


def _plain_items(value: Any, items: Iterable[tuple[Any, Any]], kind: type[Any]) -> Any:
    """The container itself when there is nothing to strip: large data is looked at, not copied."""
    changed = {}
    for key, item in items:
        if type(item) not in _PLAIN and (stripped := plain(item)) is not item:
            changed[key] = stripped
    if type(value) is kind and not changed:
        return value
    copied = kind(value)
    for key, item in changed.items():
        copied[key] = item
    return copied


_PLAIN = frozenset({str, int, float, bool, type(None)})


class Aliased(str):
    """A string that equals its other spellings too: `ok` is `success`."""

    __slots__ = ("aliases",)
    aliases: tuple[str, ...]

    def __new__(cls, value: str, aliases: tuple[str, ...] = ()) -> Self:
        self = super().__new__(cls, value)
        self.aliases = aliases
        return self

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in self.aliases

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class EventName(Aliased):
    """`event.name` in a guard, under every name that the same boundary is known by."""

    __slots__ = ()

    def __new__(cls, value: str) -> Self:
        return super().__new__(cls, value, _EVENT_ALIASES.get(value, ()))


_EVENT_ALIASES: dict[str, tuple[str, ...]] = {
    "step.failed": ("call.error",),
    "call.error": ("step.failed",),
    "step.exit": ("call.done",),
    "call.done": ("step.exit",),
    "loop.done": ("step.exit", "call.done"),
    "loop.fanin.completed": ("loop.done", "step.exit", "call.done"),
    "retry.completed": ("step.exit", "call.done"),
}

_OK = Aliased("ok", ("success",))
_FAILED = Aliased("error", ("failed",))


class ErrorView(dict[str, Any]):
    """`error.*`: every field is there even when nothing failed, and then it counts as false."""

    def __bool__(self) -> bool:
        return bool(self["kind"])


def error_view(error: ToolError | None) -> ErrorView:
    if error is None:
        return ErrorView(kind="", code="", message="", retryable=False)
    return ErrorView(
        error.details,
        kind=error.kind,
        code=error.code,
        message=error.message,
        retryable=error.retryable,
    )


class Facts:
    """A result under all its names: what the envelope says, then what the payload says."""

    __slots__ = ("data", "document", "envelope", "error", "stats")

    def __init__(
        self,
        envelope: Envelope,
        document: Any,
        error: ToolError | None,
        stats: Mapping[str, int] | None,
    ) -> None:
        self.envelope = envelope
        self.document = document
        self.data = document.data if isinstance(document, StepDocument) else document
        self.error = error
        self.stats = stats

    def of_envelope(self, name: str) -> Any:
        match name:
            case "status":
                return _OK if self.envelope.status == "ok" else _FAILED
            case "_ref" | "ref":
                return _reference(self.envelope.reference)
            case "error":
                return error_view(self.error)
            case "stats":
                return self._loop_stats()
            case "http" | "pg" | "py":
                return self._protocol(name)
            case "execution_id" | "execution_status":
                return self.envelope.context.get(name, MISSING)
            case _:
                return MISSING

    def of_payload(self, name: str) -> Any:
        """One of the other spellings, for a name that the payload itself does not have."""
        inner = self.data.get("data", MISSING) if isinstance(self.data, dict) else MISSING
        match name:
            case "data":
                return self.data
            case "command_0":
                return self.data
            case "body":
                return self.data if inner is MISSING else inner
            case "meta":
                return self.document.meta if isinstance(self.document, StepDocument) else {}
            case "results" | "rows" if isinstance(self.data, list):
                return self.data
            case "row_count":
                rows = self.data.get("rows") if isinstance(self.data, dict) else self.data
                return len(rows) if isinstance(rows, list) else MISSING
            case _:
                return inner.get(name, MISSING) if isinstance(inner, dict) else MISSING

    @property
    def results(self) -> dict[str, Any]:
        """What each task of a pipeline returned."""
        return self.document.results if isinstance(self.document, StepDocument) else {}

    def _loop_stats(self) -> Any:
        if self.stats is not None:
            return dict(self.stats)
        context = self.envelope.context
        if "stats.total" in context:
            return {name: context[f"stats.{name}"] for name in ("total", "success", "failed")}
        if isinstance(self.data, list):
            failed = sum(item is None for item in self.data)
            total = len(self.data)
            return {"total": total, "success": total - failed, "failed": failed}
        return MISSING

    def _protocol(self, name: str) -> Any:
        if self.error is not None and name in self.error.details:
            return self.error.details[name]
        if name == "http" and isinstance(self.data, dict) and "status_code" in self.data:
            return {"status": self.data["status_code"], "headers": self.data.get("headers", {})}
        if self.data is MISSING:
            return MISSING
        return dict.fromkeys(_PROTOCOL_FIELDS[name])


_PROTOCOL_FIELDS: dict[str, tuple[str, ...]] = {
    "http": ("status", "headers"),
    "pg": ("sqlstate",),
    "py": ("exception",),
}


def _reference(reference: Reference | None) -> dict[str, Any] | None:
    if reference is None:
        return None
    found: dict[str, Any] = msgspec.to_builtins(reference)
    if reference.execution_id is not None:
        found["execution_id"] = str(reference.execution_id)
    return {**found, "ref_id": str(reference.ref_id)}


class DictView(dict[str, Any]):
    """A payload that is an object: its own fields first, then the other spellings.

    `s.status` and `s.error` are the envelope's even where the payload has fields of that name: a
    result must not be able to say that it failed. Those fields are at `s.data.status`.
    """

    __slots__ = ("facts",)

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts.data)
        self.facts = facts

    def __getitem__(self, name: str) -> Any:
        if name in {"status", "error"} or (name == "results" and self.facts.results):
            return _spelled(self.facts, name)
        found = super().__getitem__(name)
        return _inner(found, self.facts.data) if name == "data" else found

    def __missing__(self, name: str) -> Any:
        return _spelled(self.facts, name)


class ListView(list[Any]):
    """A payload that is a list, such as the ordered results of a loop."""

    __slots__ = ("facts",)

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts.data)
        self.facts = facts

    def __getitem__(self, key: Any) -> Any:
        return _spelled(self.facts, key) if isinstance(key, str) else super().__getitem__(key)


class ScalarView:
    """A payload that is a number, a text, true, false or nothing."""

    __slots__ = ("facts",)

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def __getitem__(self, name: str) -> Any:
        return _spelled(self.facts, name)

    def __bool__(self) -> bool:
        return bool(self.facts.data)

    def __str__(self) -> str:
        return str(self.facts.data)

    def __eq__(self, other: object) -> bool:
        return bool(
            self.facts.data == (other.facts.data if isinstance(other, ScalarView) else other)
        )

    def __hash__(self) -> int:
        return hash(self.facts.data)


def _spelled(facts: Facts, name: str) -> Any:
    found = facts.of_envelope(name)
    if found is MISSING and name == "results" and facts.results:
        return facts.results
    if found is MISSING:
        found = facts.of_payload(name)
    if found is MISSING:
        raise KeyError(name)
    return found


class InnerDict(dict[str, Any]):
    """The `data` of a payload, which also answers for what stands beside it there."""

    __slots__ = ("beside",)
    beside: dict[str, Any]

    def __missing__(self, name: str) -> Any:
        return self.beside[name]


class InnerList(list[Any]):
    __slots__ = ("beside",)
    beside: dict[str, Any]

    def __getitem__(self, key: Any) -> Any:
        return self.beside[key] if isinstance(key, str) else super().__getitem__(key)


def _inner(inner: Any, beside: dict[str, Any]) -> Any:
    """`output.data` is the payload, and the body where the payload has one: it answers as both."""
    if inner is beside:
        return inner
    found: InnerDict | InnerList
    if isinstance(inner, dict):
        found = InnerDict(inner)
    elif isinstance(inner, list):
        found = InnerList(inner)
    else:
        return inner
    found.beside = beside
    return found


class PartialView:
    """A result whose payload is not here: answers what the envelope covers, asks for the rest."""

    __slots__ = ("facts", "paths", "prefix")

    def __init__(self, facts: Facts, paths: frozenset[str], prefix: str = "") -> None:
        self.facts = facts
        self.paths = paths
        self.prefix = prefix

    def __getitem__(self, name: Any) -> Any:
        known = MISSING if self.prefix else self.facts.of_envelope(str(name))
        if known is not MISSING:
            return known
        path = f"{self.prefix}{name}"
        if path in self.facts.envelope.context:
            return self.facts.envelope.context[path]
        if path not in self.paths and any(other.startswith(f"{path}.") for other in self.paths):
            return PartialView(self.facts, self.paths, f"{path}.")
        raise self.needed()

    def needed(self) -> ReferenceNeeded:
        reference = self.facts.envelope.reference
        assert reference is not None, self.facts.envelope
        return ReferenceNeeded(reference)

    def _refuse(self, *_: object) -> Any:
        raise self.needed()

    __bool__ = __str__ = __iter__ = __len__ = __contains__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __add__ = __radd__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]
