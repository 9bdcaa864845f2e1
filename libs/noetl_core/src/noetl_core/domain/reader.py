"""Reading a YAML tree field by field: every wrong one is reported and stands in for a good default.

So one pass over a document finds all that is wrong with it, not only the first.
"""

import re
from collections.abc import Iterable
from typing import Any, TypeVar, cast, get_args, get_type_hints

from noetl_core.domain.errors import Problem
from noetl_core.domain.template import is_template, nearest
from noetl_core.domain.yaml_tree import Mapping, Node, Scalar, Sequence, data_of, describe

C = TypeVar("C", bound=str | None)

NOT_YET = "is not supported by this version"

DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION_SECONDS_MAX = 100 * 365 * 86400.0
"""Beyond a few thousand years neither the database nor Python has a date for its end."""
FLAGS = {"yes": True, "on": True, "no": False, "off": False}


class Report:
    """The problems of one document, in the order they are found."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems

    def add(
        self, node: Node, message: str, *, key: str = "", hint: str = "", severity: str = "error"
    ) -> None:
        self.problems.append(
            Problem(
                message=message,
                line=node.line,
                column=node.column,
                key=key,
                hint=hint,
                severity=severity,
            )
        )


class Fields:
    """The fields of one mapping. `what` is how messages call it, `later` what is not there yet."""

    def __init__(
        self,
        report: Report,
        node: Node,
        *,
        what: str,
        known: Iterable[str],
        later: Iterable[str] = (),
    ) -> None:
        self.report = report
        self.node = node
        self.what = what
        self._known = tuple(known)
        self._fields = node.items if isinstance(node, Mapping) else {}
        if isinstance(node, Mapping):
            self._check_keys(node, frozenset(later))
        elif not _is_empty(node):
            report.add(node, f"{what} must be a mapping, not {describe(node)}")

    def _check_keys(self, node: Mapping, later: frozenset[str]) -> None:
        for key, value in node.items.items():
            if key in self._known or (key in later and _is_empty(value)):
                continue
            if key in later:
                self.report.add(node.keys[key], f"`{key}` {NOT_YET}", key=key)
            else:
                message = f"unknown key `{key}` in {self.what}"
                hint = suggestion(key, self._known)
                self.report.add(node.keys[key], message, key=key, hint=hint)

    def get(self, name: str) -> Node | None:
        """The node of a field that is there and not null."""
        node = self._fields.get(name)
        return None if isinstance(node, Scalar) and node.value is None else node

    def has(self, name: str) -> bool:
        return name in self._fields

    def wrong(self, name: str, expected: str, *, hint: str = "") -> None:
        node = self._fields[name]
        message = f"`{name}` must be {expected}, not {describe(node)}"
        self.report.add(node, message, key=name, hint=hint)

    def missing(self, name: str) -> None:
        if isinstance(self.node, Mapping) or _is_empty(self.node):
            self.report.add(self.node, f"{self.what} needs `{name}`", key=name)

    def text(self, name: str, default: str = "") -> str:
        node = self.get(name)
        if node is None:
            return default
        if isinstance(node, Scalar) and isinstance(node.value, str):
            return node.value
        quote = f'quote it: "{node.text}"' if isinstance(node, Scalar) else ""
        self.wrong(name, "a text", hint=quote)
        return default

    def required_text(self, name: str) -> str:
        found = self.text(name)
        node = self.get(name)
        if node is None or (isinstance(node, Scalar) and node.value == ""):
            self.missing(name)
        return found

    def flag(self, name: str, *, default: bool) -> bool:
        node = self.get(name)
        if node is None:
            return default
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, str):
            value = FLAGS.get(value.lower())
        if isinstance(value, bool):
            return value
        self.wrong(name, "true or false")
        return default

    def whole(self, name: str, default: int, *, at_least: int, at_most: int) -> int:
        node = self.get(name)
        if node is None:
            return default
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most:
            return value
        self.wrong(name, f"a whole number from {at_least} to {at_most}")
        return default

    def seconds(self, name: str, default: float | None = None) -> float | None:
        node = self.get(name)
        if node is None:
            return default
        seconds = duration(node.value) if isinstance(node, Scalar) else None
        if seconds is None:
            self.wrong(name, "a duration such as 30s, 5m, 1h, or a number of seconds")
        elif seconds > DURATION_SECONDS_MAX:
            self.wrong(name, "a duration of 100 years at most")
            return default
        return seconds

    def choice(self, name: str, default: C, model: type, *, later: tuple[str, ...] = ()) -> C:
        """One of the texts that the field of this name may have in the model."""
        node = self.get(name)
        if node is None:
            return default
        value = node.value if isinstance(node, Scalar) else None
        choices = _literals(get_type_hints(model)[name])
        if value in choices:
            return cast("C", value)
        if value in later:
            self.report.add(node, f"`{name}: {value}` {NOT_YET}", key=name)
        else:
            near = nearest(str(value), choices)
            hint = f"did you mean `{near}`?" if near else ""
            self.wrong(name, " or ".join(choices), hint=hint)
        return default

    def data(self, name: str) -> dict[str, Any]:
        """A mapping of plain data."""
        node = self.get(name)
        if node is None:
            return {}
        if isinstance(node, Mapping):
            found: dict[str, Any] = data_of(node)
            return found
        self.wrong(name, "a mapping")
        return {}

    def items(self, name: str, *, hint: str = "") -> list[Node]:
        node = self.get(name)
        if node is None:
            return []
        if isinstance(node, Sequence):
            return node.items
        self.wrong(name, "a list", hint=hint)
        return []

    def section(self, name: str, *, known: Iterable[str], later: Iterable[str] = ()) -> "Fields":
        """The fields of an inner mapping; of an empty one where it is absent."""
        node = self.get(name) or Mapping(self.node.line, self.node.column)
        return Fields(self.report, node, what=f"`{name}`", known=known, later=later)


def duration(value: object) -> float | None:
    """Seconds in `90`, `1.5`, `30s`, `5m`, `1h30m`, `7d`; None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if value >= 0 else None
    if not isinstance(value, str) or DURATION.fullmatch(value.strip()) is None:
        return None
    parts = _DURATION_PART.findall(value)
    return float(sum(float(number) * _SECONDS[unit] for number, unit in parts))


def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest valid key, or all of them."""
    names = sorted(set(known))
    near = nearest(name, names)
    if near is not None:
        return f"did you mean `{near}`?"
    return f"valid: {', '.join(names)}" if names else ""


def guard_text(fields: Fields, name: str) -> str | None:
    """A guard: a template, or a bare true or false."""
    node = fields.get(name)
    if node is None:
        return None
    if not isinstance(node, Scalar):
        fields.wrong(name, 'a template such as "{{ output.data.total > 0 }}"')
        return None
    text = str(node.value).lower() if isinstance(node.value, bool) else node.text
    if not is_template(text) and text.strip().lower() not in CONSTANT_GUARDS:
        hint = f'write it as a template: "{{{{ {text} }}}}"'
        fields.wrong(name, "a template, or true or false", hint=hint)
    return text


CONSTANT_GUARDS = frozenset({"true", "false", "yes", "no", "1", "0", "none", ""})


def _literals(annotation: Any) -> tuple[str, ...]:
    """`"any", "all"` of `Literal["any", "all"] | None`."""
    arguments = get_args(annotation)
    texts = tuple(argument for argument in arguments if isinstance(argument, str))
    return texts or tuple(text for argument in arguments for text in _literals(argument))


def _is_empty(node: Node) -> bool:
    match node:
        case Scalar(value=value):
            return value is None
        case Sequence(items=items):
            return not items
        case Mapping(items=fields):
            return not fields
    return False
