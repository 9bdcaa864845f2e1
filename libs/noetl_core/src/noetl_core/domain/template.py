"""Templates: `{{ ... }}` in a playbook, compiled once and evaluated with native types.

- A string that is exactly one `{{ expression }}` (whitespace around it does not count) gives the
  value of the expression, whatever its type. It is never turned into text and read back.
- Any other string with `{{` or `{%` gives text. Values appear in it as Jinja2 writes them: None is
  "None", True is "True", a dict is its Python form. That is what users of Jinja2 know from
  elsewhere, and it is right inside Python code; for JSON say `| tojson`, for SQL bind parameters.
- A string without these marks is itself.

An unknown name is an error, never an empty text. Values are never rendered again.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Template as Jinja
from jinja2 import TemplateRuntimeError, TemplateSyntaxError, meta, nodes
from jinja2.utils import missing

from noetl_core.domain.errors import NoetlError, TemplateError
from noetl_core.domain.sandbox import (
    Evaluation,
    Sandbox,
    UnknownNameError,
    concatenated,
    native,
    prepare,
)

COMPILED_MAX = 4096
"""Compiled templates that are kept; the least recently used one goes."""

FALSE_TEXTS = frozenset({"", "0", "false", "no", "none"})
"""What counts as false when a guard gives text, in any case."""

GLOBAL_NAMES = frozenset({"range", "dict"})
"""Names that every template has and nothing else can define."""

Path = tuple[str, ...]

_sandbox = Sandbox()


class Template:
    """A compiled template. Made by `compile_template`."""

    __slots__ = ("_evaluate", "optional_paths", "paths", "roots", "text")

    def __init__(
        self,
        text: str,
        *,
        paths: frozenset[Path] = frozenset(),
        optional_paths: frozenset[Path] = frozenset(),
        evaluate: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.text = text
        self.paths = paths
        """What is read: a root and the constant fields that follow. A computed use ends a path."""
        self.optional_paths = optional_paths
        """Those of `paths` that may be missing: asked for with `default` or `is defined`."""
        self.roots = frozenset(path[0] for path in paths)
        """The names that are looked up; everything else in the template is its own."""
        self._evaluate = evaluate

    def evaluate(self, names: Mapping[str, Any]) -> Any:
        """The value. Only the roots are looked up in `names`, which may be lazy."""
        if self._evaluate is None:
            return self.text
        found: dict[str, Any] = {}
        for root in self.roots:
            try:
                found[root] = names[root]
            except KeyError:
                continue
        try:
            return self._evaluate(found)
        except NoetlError:
            raise
        except UnknownNameError as error:
            raise self._unknown(error, names) from None
        except Exception as error:
            raise TemplateError(_one_line(error), step="", field="") from error

    def _unknown(self, error: UnknownNameError, names: Mapping[str, Any]) -> TemplateError:
        name = str(error.name)
        if error.owner is missing:
            reason = f"`{name}` is not defined" + did_you_mean(name, names)
        else:
            reason = f"`{self._written(name)}` is not there" + _what_is_there(name, error.owner)
        return TemplateError(reason, step="", field="", name=name)

    def _written(self, field: str) -> str:
        """The field as the template spells it, from the root on."""
        spelled = (path[: path.index(field, 1) + 1] for path in self.paths if field in path[1:])
        return ".".join(min(spelled, default=(field,)))


@lru_cache(maxsize=COMPILED_MAX)
def compile_template(text: str) -> Template:
    """Raises TemplateError, without step and field, for text that is no valid template."""
    if not is_template(text):
        return Template(text)
    try:
        return _compile(text)
    except TemplateSyntaxError as error:
        raise TemplateError(_syntax_reason(error, text), step="", field="") from None
    except Exception as error:
        raise TemplateError(_one_line(error), step="", field="") from error


def is_template(value: object) -> bool:
    return isinstance(value, str) and ("{{" in value or "{%" in value)


def render(value: Any, names: Mapping[str, Any], *, step: str, field: str) -> Any:
    """Plain data with every string evaluated, once; keys are not. Static parts are shared."""
    try:
        return _render(value, names)
    except _FailedError as failed:
        error = failed.error
        where = field + "".join(reversed(failed.places))
        raise TemplateError(error.reason, step=step, field=where, name=error.name) from error


def is_true(
    guard: str | bool | None,
    names: Mapping[str, Any],
    *,
    step: str,
    field: str,
) -> bool:
    """Whether a guard lets through. A guard that cannot be evaluated raises; it is not false."""
    value = render(guard, names, step=step, field=field)
    if isinstance(value, str):
        return value.strip().lower() not in FALSE_TEXTS
    return bool(value)


def did_you_mean(name: str, candidates: Iterable[object]) -> str:
    """` (did you mean `total`?)`, or nothing when no candidate is close."""
    near = nearest(name, candidates)
    return "" if near is None else f" (did you mean `{near}`?)"


def nearest(name: str, candidates: Iterable[object]) -> str | None:
    texts = [candidate for candidate in candidates if isinstance(candidate, str)]
    found = difflib.get_close_matches(name, texts, n=1)
    return found[0] if found else None


class _FailedError(Exception):
    """Carries a template's error up through the containers, which add where it stood."""

    def __init__(self, error: TemplateError) -> None:
        super().__init__()
        self.error = error
        self.places: list[str] = []


def _render(value: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return _render_text(value, names)
    if isinstance(value, dict):
        return _render_items(value, value.items(), names, _dotted)
    if isinstance(value, list | tuple):
        return _render_items(value, enumerate(value), names, _numbered)
    return value


def _dotted(key: object) -> str:
    return f".{key}"


def _numbered(index: object) -> str:
    return f"[{index}]"


_NEVER_TEMPLATES = frozenset({int, float, bool, type(None)})


def _render_text(text: str, names: Mapping[str, Any]) -> Any:
    if not is_template(text):
        return text
    try:
        return compile_template(text).evaluate(names)
    except TemplateError as error:
        raise _FailedError(error) from error


def _render_items(
    container: Any,
    items: Iterable[tuple[Any, Any]],
    names: Mapping[str, Any],
    place: Callable[[Any], str],
) -> Any:
    """A copy with what changed; the container itself if nothing did: static data costs a walk."""
    changed: dict[Any, Any] = {}
    for key, value in items:
        if type(value) in _NEVER_TEMPLATES or (type(value) is str and not is_template(value)):
            continue
        try:
            rendered = _render(value, names)
        except _FailedError as failed:
            failed.places.append(place(key))
            raise
        if rendered is not value:
            changed[key] = rendered
    if not changed:
        return container
    if isinstance(container, dict):
        return {**container, **changed}
    return [changed.get(index, value) for index, value in enumerate(container)]


def _compile(text: str) -> Template:
    tree = _sandbox.parse(text.strip())
    expression = _only_expression(tree)
    if expression is None:
        tree = _sandbox.parse(text)
    reads = _reads_of(tree)
    prepared = prepare(tree)
    if expression is None:
        evaluate = _as_text(_sandbox.from_string(prepared))
    else:
        evaluate = _as_value(_sandbox.from_string(_assigned(prepared)))
    return Template(text, paths=reads[0], optional_paths=reads[1], evaluate=evaluate)


def _only_expression(tree: nodes.Template) -> nodes.Expr | None:
    match tree.body:
        case [nodes.Output(nodes=[nodes.TemplateData()])]:
            return None
        case [nodes.Output(nodes=[expression])]:
            return expression
    return None


_RESULT = "result"


def _assigned(tree: nodes.Template) -> nodes.Template:
    """`{{ e }}` as `{% set result = e %}`, so that the value is kept instead of its text."""
    output = tree.body[0]
    assert isinstance(output, nodes.Output), output
    target = nodes.Name(_RESULT, "store", lineno=1)
    assign = nodes.Assign(target, output.nodes[0], lineno=1)
    assigned = nodes.Template([assign], lineno=1)
    assigned.set_environment(_sandbox)
    return assigned


def _as_value(compiled: Jinja) -> Callable[[dict[str, Any]], Any]:
    run = compiled.root_render_func

    def evaluate(found: dict[str, Any]) -> Any:
        context = Evaluation(_sandbox, found)
        for _ in run(context):
            pass
        return native(context.vars[_RESULT])

    return evaluate


def _as_text(compiled: Jinja) -> Callable[[dict[str, Any]], Any]:
    run = compiled.root_render_func

    def evaluate(found: dict[str, Any]) -> str:
        return concatenated(run(Evaluation(_sandbox, found)))

    return evaluate


def _reads_of(tree: nodes.Template) -> tuple[frozenset[Path], frozenset[Path]]:
    roots = meta.find_undeclared_variables(tree) - GLOBAL_NAMES
    paths, optional = set[Path](), set[Path]()
    _collect(tree, paths, optional)
    return (
        frozenset(path for path in paths if path[0] in roots),
        frozenset(path for path in optional if path[0] in roots),
    )


def _collect(node: nodes.Node, paths: set[Path], optional: set[Path]) -> None:
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        # `x.get("a")` reads x: what a method does with it cannot be seen.
        node = nodes.Call(
            node.node.node, node.args, node.kwargs, node.dyn_args, node.dyn_kwargs, lineno=1
        )
    if isinstance(node, nodes.Name | nodes.Getattr | nodes.Getitem):
        base, path = _unroll(node, paths, optional)
        if path is not None:
            paths.add(path)
            return
        node = base
    subject = _may_be_missing(node)
    if subject is not None:
        _, path = _unroll(subject, set(), set())
        optional.update(() if path is None else (path,))
    for child in node.iter_child_nodes():
        _collect(child, paths, optional)


def _unroll(
    node: nodes.Node, paths: set[Path], optional: set[Path]
) -> tuple[nodes.Node, Path | None]:
    """What a chain of fields starts from and, when that is a name, the path it spells."""
    fields: list[str] = []
    while True:
        if isinstance(node, nodes.Getattr):
            fields.append(node.attr)
            node = node.node
        elif isinstance(node, nodes.Getitem):
            key = node.arg.value if isinstance(node.arg, nodes.Const) else None
            if isinstance(key, str):
                fields.append(key)
            else:
                fields.clear()
                _collect(node.arg, paths, optional)
            node = node.node
        elif isinstance(node, nodes.Name):
            return node, (node.name, *reversed(fields))
        else:
            return node, None


def _may_be_missing(node: nodes.Node) -> nodes.Node | None:
    """The subject of `x | default(...)` and `x is defined`."""
    if isinstance(node, nodes.Filter) and node.name in {"default", "d"}:
        return node.node
    if isinstance(node, nodes.Test) and node.name in {"defined", "undefined"}:
        return node.node
    return None


def _what_is_there(name: str, owner: object) -> str:
    if isinstance(owner, Mapping):
        return did_you_mean(name, owner)
    if owner is None:
        return ": the value before it is null"
    return f": the value before it is a {type(owner).__name__}"


def _syntax_reason(error: TemplateSyntaxError, text: str) -> str:
    reason = (error.message or "it is no valid template").rstrip(".")
    where = f" (line {error.lineno} of the template)" if "\n" in text.strip() else ""
    return reason[:1].lower() + reason[1:] + where


def _one_line(error: Exception) -> str:
    text = str(error).rstrip(".")
    if not isinstance(error, TemplateRuntimeError):
        text = f"{type(error).__name__}: {text}"
    return text.splitlines()[0]
