"""Where templates run: Jinja2 without side effects, without chance, and with a limit on everything.

A template comes from a user and runs inside the broker, so it must not reach Python's internals,
change what it was given, answer differently the second time, or run away:

- private attributes and changing methods are closed (Jinja2's immutable sandbox);
- `random`, `lipsum` and everything that keeps state between evaluations is not there;
- statements that can call themselves or reach other templates are refused;
- iterations, numbers and texts have limits.
"""

import base64
import operator
import re
import shlex
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NoReturn

import msgspec
from jinja2 import StrictUndefined, UndefinedError, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.filters import FILTERS
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing
from jinja2.visitor import NodeTransformer
from markupsafe import Markup, soft_str

TEXT_MAX = 16 * 1024 * 1024
"""Characters that one evaluation may make."""

ITEMS_MAX = 4_000_000
"""Items that an operator may put into one list."""

ITERATIONS_MAX = 200_000
"""Turns of all `{% for %}` loops in one evaluation."""

POWER_BITS_MAX = 4096

_STATEMENTS = (
    nodes.Output,
    nodes.If,
    nodes.For,
    nodes.Assign,
    nodes.AssignBlock,
    nodes.FilterBlock,
    nodes.With,
)
_WIDE_FORMAT = re.compile(r"\d{6}|\*")
_ATTRIBUTES_ONLY = frozenset({str, int, float, bool, list, tuple, type(None)})
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_PLAIN = frozenset({str, int, float, bool, type(None), dict, list})


class UnknownNameError(UndefinedError):
    """A template read a name, or a field of `owner`, that is not there."""

    def __init__(self, message: str, *, name: object, owner: object = missing) -> None:
        super().__init__(message)
        self.name = name
        self.owner = owner


class Unknown(StrictUndefined):
    """What an unknown name gives: any use of it raises, but for `default` and `is defined`."""

    __slots__ = ()

    def _fail_with_undefined_error(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        if self._undefined_exception is not UndefinedError or self._undefined_hint:
            raise self._undefined_exception(self._undefined_message)
        raise UnknownNameError(
            self._undefined_message, name=self._undefined_name, owner=self._undefined_obj
        )

    # StrictUndefined binds its operators to the method of its own base, so each is bound anew.
    __iter__ = __str__ = __repr__ = __len__ = _fail_with_undefined_error
    __eq__ = __ne__ = __bool__ = __hash__ = _fail_with_undefined_error
    __contains__ = _fail_with_undefined_error
    __add__ = __radd__ = __sub__ = __rsub__ = _fail_with_undefined_error
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _fail_with_undefined_error
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _fail_with_undefined_error
    __pow__ = __rpow__ = __pos__ = __neg__ = __call__ = __getitem__ = _fail_with_undefined_error
    __lt__ = __le__ = __gt__ = __ge__ = _fail_with_undefined_error
    __int__ = __float__ = __complex__ = _fail_with_undefined_error


class Evaluation(Context):
    """The context of one evaluation, which counts its iterations.

    Made directly, not by Jinja2's `new_context`: making it is most of what a small template costs.
    """

    def __init__(self, environment: "Sandbox", found: dict[str, Any]) -> None:
        self.environment = environment
        self.parent = {**environment.globals, **found}
        self.vars = {}
        self.eval_ctx = environment.shared_eval_context
        self.exported_vars = set()
        self.name = None
        self.blocks = {}
        self.globals_keys = set()
        self._iterations = 0

    def spend(self) -> None:
        self._iterations += 1
        if self._iterations > ITERATIONS_MAX:
            raise SecurityError(f"a template may not loop more than {ITERATIONS_MAX} times")


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=Unknown, keep_trailing_newline=True, cache_size=0)
        for name in ("lipsum", "cycler", "joiner", "namespace"):
            del self.globals[name]
        del self.filters["random"]
        self.filters.update(_FILTERS)
        self.shared_eval_context = nodes.EvalContext(self)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The key before the attribute: `x.items` is the value under "items" if there is one."""
        if type(obj) not in _ATTRIBUTES_ONLY:
            try:
                return obj[attribute]
            except (LookupError, TypeError):
                pass
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Of a mapping, the key and nothing else: `x["items"]` is never a method."""
        if isinstance(obj, Mapping):
            try:
                return obj[argument]
            except (LookupError, TypeError):
                return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(text, str):
            _refuse_wide(text if __obj.__name__ in {"format", "format_map"} else "", args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _BINARY_LIMITS[operator](left, right)
        if isinstance(left, str):
            # `"%s" % rows | map(...)`: the text of what is made lazily would be its address.
            right = native(right)
        return super().call_binop(context, operator, left, right)


def prepare(tree: nodes.Template) -> nodes.Template:
    """Refuse what a template may not do, and put the limits into what it may."""
    for statement in tree.find_all(nodes.Stmt):
        if not isinstance(statement, _STATEMENTS):
            raise TemplateAssertionError(
                f"`{type(statement).__name__.lower()}` is not available in a template",
                statement.lineno,
            )
    for name in tree.find_all(nodes.Name):
        if name.name == "self":
            raise TemplateAssertionError("`self` is not available in a template", name.lineno)
    for loop in tree.find_all(nodes.For):
        if loop.recursive:
            raise TemplateAssertionError("a loop in a template may not be recursive", loop.lineno)
    prepared: nodes.Template = _Limits().visit(tree)
    return prepared


def native(value: Any) -> Any:
    """The value as plain data: what is made lazily (`map`, `range`, `d.keys()`) becomes a list."""
    if type(value) in _PLAIN or isinstance(value, Mapping):
        return value
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    if isinstance(value, Markup):
        return str.__str__(value)
    if isinstance(value, _FUNCTIONS):
        raise TypeError(f"{_name_of(value)} is a function: call it, or name a value")
    if isinstance(value, Iterator | range | set | frozenset) or type(value) in _VIEWS:
        return _list(value)
    return value


def concatenated(pieces: Iterable[str]) -> str:
    """The text of a template, refused as soon as it is too long."""
    texts: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > TEXT_MAX:
            raise SecurityError(f"a template may not give more than {TEXT_MAX} characters")
        texts.append(piece)
    return "".join(texts)


class _Limits(NodeTransformer):
    """Rewrites a template so that loops count, `~` is bounded, and literals hold plain data."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        pieces = [_native_unless_constant(piece) for piece in node.nodes]
        return _filtered(nodes.List(pieces, lineno=node.lineno), "_concatenated")

    def visit_List(self, node: nodes.List) -> nodes.List:  # noqa: N802
        self.generic_visit(node)
        node.items = [_native_unless_constant(item) for item in node.items]
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Tuple:  # noqa: N802
        self.generic_visit(node)
        if node.ctx == "load":
            node.items = [_native_unless_constant(item) for item in node.items]
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        node.value = _native_unless_constant(node.value)
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _native_unless_constant(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, "_native")


@pass_context
def _counted(context: Evaluation, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        context.spend()
        yield value


def _concatenated(values: list[Any]) -> str:
    return concatenated(map(str, values))


def _list(values: Iterable[Any]) -> list[Any]:
    """`rows | map(attribute='typo') | list` fails here; `| select('defined')` before it helps."""
    items = list(values)
    for item in items:
        if isinstance(item, Undefined):
            item._fail_with_undefined_error()
    return items


def _refuse_wide(
    pattern: str, values: Iterable[Any], named: Mapping[str, Any] | None = None
) -> None:
    """Padding turns a small number into a large text."""
    everything = [*values, *(named or {}).values()]
    if _WIDE_FORMAT.search(pattern) or any(isinstance(v, int) and v > TEXT_MAX for v in everything):
        raise SecurityError(f"a template may not pad a text beyond {TEXT_MAX} characters")


def _limit_sum(left: Any, right: Any) -> None:
    if isinstance(left, Sized) and isinstance(right, Sized):
        _limit_length(left, len(left) + len(right))


def _limit_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, Sized) and isinstance(times, int):
            _limit_length(many, len(many) * times)
    if isinstance(left, int) and isinstance(right, int):
        _limit_bits(left.bit_length() + right.bit_length())


def _limit_length(sample: Sized, length: int) -> None:
    most = TEXT_MAX if isinstance(sample, str) else ITEMS_MAX
    if length > most:
        what = "characters" if isinstance(sample, str) else "items"
        raise SecurityError(f"a template may not make more than {most} {what}")


def _limit_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _limit_bits(left.bit_length() * right)


def _limit_bits(bits: int) -> None:
    if bits > POWER_BITS_MAX:
        raise SecurityError(f"a number in a template may not have more than {POWER_BITS_MAX} bits")


def _limit_format(left: Any, right: Any) -> None:
    if isinstance(left, str):
        _refuse_wide(left, right if isinstance(right, tuple) else (right,))


_BINARY_LIMITS: dict[str, Callable[[Any, Any], None]] = {
    "+": _limit_sum,
    "*": _limit_product,
    "**": _limit_power,
    "%": _limit_format,
}


def _center(value: Any, width: int = 80) -> str:
    _refuse_wide("", (width,))
    return str(value).center(width)


def _indent(value: Any, width: int | str = 4, *args: Any, **kwargs: Any) -> str:
    _refuse_wide("", (width,))
    text: str = FILTERS["indent"](str(value), width, *args, **kwargs)
    return text


def _string(value: Any) -> str:
    return soft_str(native(value))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    args = tuple(native(arg) for arg in args)
    kwargs = {name: native(arg) for name, arg in kwargs.items()}
    _refuse_wide(str(value), args, kwargs)
    text: str = FILTERS["format"](value, *args, **kwargs)
    return text


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as other systems write it: nothing is escaped for HTML."""
    encoded = msgspec.json.encode(value, enc_hook=_encode_lazy)
    return (encoded if indent is None else msgspec.json.format(encoded, indent=indent)).decode()


def _encode_lazy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    plain = native(value)
    if plain is value:
        raise TypeError(f"a {type(value).__name__} has no JSON form")
    return plain


def _from_json(text: str | bytes) -> Any:
    return msgspec.json.decode(text)


def _b64encode(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _b64decode(value: str | bytes) -> str:
    return base64.b64decode(value).decode()


def _split(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


def _shell_quote(value: Any) -> str:
    """One word of a shell command, whatever is in it; a list becomes a word for each item."""
    plain = native(value)
    if isinstance(plain, list | tuple):
        return shlex.join(map(str, plain))
    return shlex.quote(str(plain))


def _name_of(value: Any) -> str:
    return f"`{getattr(value, '__name__', type(value).__name__)}`"


_VIEWS: tuple[type, ...] = (
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    type(reversed([])),
)

_FILTERS: dict[str, Callable[..., Any]] = {
    "_counted": _counted,
    "_concatenated": _concatenated,
    "_native": native,
    "center": _center,
    "indent": _indent,
    "list": _list,
    "format": _format,
    "string": _string,
    "tojson": _to_json,
    "fromjson": _from_json,
    "b64encode": _b64encode,
    "b64decode": _b64decode,
    "bool": operator.truth,
    "split": _split,
    "shell_quote": _shell_quote,
}
