"""Templates give native values, refuse unknown names, and say where they failed."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import ReferenceNeeded, RetryableError, TemplateError
from noetl_core.domain.ids import RefId
from noetl_core.domain.template import (
    COMPILED_MAX,
    compile_template,
    is_template,
    is_true,
    render,
)

NAMES: dict[str, Any] = {
    "ctx": {"total": 3, "items": ["a", "b"], "flag": True, "nothing": None},
    "rows": [{"id": 1, "name": "x"}, {"id": 2, "name": "y"}],
    "price": 1.5,
    "text": "007",
}

PLAIN_TEXT = st.text().filter(lambda text: not is_template(text))
PLAIN_DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | PLAIN_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def evaluate(text: str, names: Mapping[str, Any] = NAMES) -> Any:
    return compile_template(text).evaluate(names)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{{ ctx.total }}", 3),
        ("{{ ctx.flag }}", True),
        ("{{ ctx.nothing }}", None),
        ("{{ price * 2 }}", 3.0),
        ("{{ text }}", "007"),
        ("{{ rows }}", NAMES["rows"]),
        ("{{ rows[0] }}", {"id": 1, "name": "x"}),
        ("{{ {'a': [ctx.total, none]} }}", {"a": [3, None]}),
        ("  {{ ctx.total }}\n", 3),
        ("{{ 'a' }}", "a"),
    ],
)
def test_a_single_expression_gives_its_value_unchanged(text: str, value: object) -> None:
    found = evaluate(text)

    assert found == value
    assert type(found) is type(value)


def test_the_value_of_an_expression_is_the_very_object() -> None:
    assert evaluate("{{ rows }}") is NAMES["rows"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("total={{ ctx.total }}", "total=3"),
        ("{{ ctx.total }}{{ ctx.total }}", "33"),
        ("{{ ctx.nothing }} and {{ ctx.flag }}", "None and True"),
        ("{% if ctx.flag %}{{ ctx.total }}{% endif %}", "3"),
        ("select 1 where {{ ctx.total }}\n", "select 1 where 3\n"),
        ("{% for row in rows %}{{ row.id }},{% endfor %}", "1,2,"),
    ],
)
def test_mixed_text_gives_text(text: str, value: str) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize("text", ["", "plain", "{ctx}", "}} {", "{# no comment #}", "[1, 2]", "3"])
def test_text_without_marks_is_itself(text: str) -> None:
    assert evaluate(text) is text


def test_text_that_looks_like_data_stays_text() -> None:
    assert evaluate("{{ value }}", {"value": "[1, 2]"}) == "[1, 2]"


def test_values_are_never_rendered_again() -> None:
    assert evaluate("{{ value }}", {"value": "{{ 1 + 1 }}"}) == "{{ 1 + 1 }}"
    assert evaluate("a {{ value }}", {"value": "{{ 1 + 1 }}"}) == "a {{ 1 + 1 }}"


def test_a_key_goes_before_a_method_of_the_same_name() -> None:
    assert evaluate("{{ ctx.items }}") == ["a", "b"]
    assert evaluate("{{ plain.items() | list }}", {"plain": {"a": 1}}) == [("a", 1)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{{ rows | map(attribute='id') }}", [1, 2]),
        ("{{ rows | selectattr('id', 'gt', 1) }}", [{"id": 2, "name": "y"}]),
        ("{{ range(3) }}", [0, 1, 2]),
        ("{{ rows[0].keys() }}", ["id", "name"]),
        ("{{ {'ids': rows | map(attribute='id')} }}", {"ids": [1, 2]}),
        ("{{ rows | tojson }}", '[{"id":1,"name":"x"},{"id":2,"name":"y"}]'),
        ("{{ '<a>' | tojson }}", '"<a>"'),
        ("{{ '{\"a\": [1]}' | fromjson }}", {"a": [1]}),
        ("{{ 'hi' | b64encode }}", "aGk="),
        ("cat {{ 'it\\'s; rm x' | shell_quote }}", """cat 'it'"'"'s; rm x'"""),
        ("{{ ['a b', 1] | shell_quote }}", "'a b' 1"),
        ("{{ 'aGk=' | b64decode }}", "hi"),
        ("{{ 'a,b' | split(',') }}", ["a", "b"]),
        ("{{ '<' | escape }}", "&lt;"),
    ],
)
def test_filters_give_plain_data(text: str, value: object) -> None:
    found = evaluate(text)

    assert found == value
    assert type(found) in {list, dict, str}


@pytest.mark.parametrize(
    ("text", "reason", "name"),
    [
        ("{{ totl }}", "`totl` is not defined (did you mean `total`?)", "totl"),
        ("{{ zzz }}", "`zzz` is not defined", "zzz"),
        ("{{ data.tota }}", "`data.tota` is not there (did you mean `total`?)", "tota"),
        ("{{ data.more.x }}", "`data.more` is not there", "more"),
        ("{{ gone.x }}", "`gone.x` is not there: the value before it is null", "x"),
        ("{{ total.x }}", "`total.x` is not there: the value before it is a int", "x"),
        ("{{ [zzz] }}", "`zzz` is not defined", "zzz"),
        ("{{ {'a': zzz} }}", "`zzz` is not defined", "zzz"),
        ("{{ zzz + 1 }}", "`zzz` is not defined", "zzz"),
        ("{{ zzz == 1 }}", "`zzz` is not defined", "zzz"),
        ("{{ 1 in zzz }}", "`zzz` is not defined", "zzz"),
        ("{{ zzz() }}", "`zzz` is not defined", "zzz"),
        ("{{ zzz | tojson }}", "`zzz` is not defined", "zzz"),
        ("a {{ zzz }}", "`zzz` is not defined", "zzz"),
        (
            "{{ [data] | map(attribute='tota') }}",
            "`tota` is not there (did you mean `total`?)",
            "tota",
        ),
        ("x{{ [data] | map(attribute='x') | list }}", "`x` is not there", "x"),
        ("{% for x in zzz %}{% endfor %}", "`zzz` is not defined", "zzz"),
    ],
)
def test_an_unknown_name_is_named(text: str, reason: str, name: str) -> None:
    with pytest.raises(TemplateError) as raised:
        evaluate(text, {"total": 3, "data": {"total": 3}, "gone": None})

    assert raised.value.reason == reason
    assert raised.value.name == name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{{ zzz | default(1) }}", 1),
        ("{{ ctx.zzz | default(1) }}", 1),
        ("{{ ctx.nothing.zzz | default(1) }}", 1),
        ("{{ zzz is defined }}", False),
        ("{{ rows | map(attribute='zzz') | select('defined') }}", []),
        ("{{ 1 if zzz is undefined else zzz }}", 1),
    ],
)
def test_a_name_may_be_asked_for_with_care(text: str, value: object) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 'a' + 1 }}", 'TypeError: can only concatenate str (not "int") to str'),
        ("{{ rows.index }}", "TypeError: `index` is a function: call it, or name a value"),
        ("{{ 'x' | fromjson }}", "DecodeError: JSON is malformed: invalid character (byte 0)"),
        (
            "{{ 1 if false }}",
            "the inline if-expression on line 1 evaluated to false and no else section was defined",
        ),
    ],
)
def test_a_failing_expression_says_why(text: str, reason: str) -> None:
    with pytest.raises(TemplateError) as raised:
        evaluate(text)

    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ a", "unexpected end of template, expected 'end of print statement'"),
        ("{{ a }", "unexpected '}'"),
        ("{{ a | nofilter }}", "no filter named 'nofilter'"),
        (
            "x\n{% if %}\n",
            "expected an expression, got 'end of statement block' (line 2 of the template)",
        ),
    ],
)
def test_a_malformed_template_is_refused_when_compiled(text: str, reason: str) -> None:
    with pytest.raises(TemplateError) as raised:
        compile_template(text)

    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("{{ output.data.total }}", {("output", "data", "total")}),
        ("{{ output['data']['total'] }}", {("output", "data", "total")}),
        ("{{ rows[0].id }}", {("rows",)}),
        ("{{ rows[i].id }}", {("rows",), ("i",)}),
        ("{{ rows[ctx.i].id }}", {("rows",), ("ctx", "i")}),
        ("{{ a.b.get('c') }}", {("a", "b")}),
        ("{{ a.items }}", {("a", "items")}),
        ("{{ now() }}", {("now",)}),
        ("{{ a.b | length > c }}", {("a", "b"), ("c",)}),
        ("{{ (a | first).b }}", {("a",)}),
        ("{{ a.b is defined }}", {("a", "b")}),
        ("{% for r in a.rows %}{{ r.id }}{% endfor %}", {("a", "rows")}),
        ("{% set o = a %}{{ o.b }}", {("a",)}),
        ("{{ range(3) }} {{ 1 }}", set()),
        ("x {{ a.b }} {{ a.c }}", {("a", "b"), ("a", "c")}),
        ("{{ f(a.b, k=c.d) }}", {("f",), ("a", "b"), ("c", "d")}),
    ],
)
def test_what_is_read_is_known(text: str, paths: set[tuple[str, ...]]) -> None:
    template = compile_template(text)

    assert template.paths == paths
    assert template.roots == {path[0] for path in paths}


def test_what_may_be_missing_is_known() -> None:
    template = compile_template("{{ a.b | default(c) }} {{ d is defined }} {{ e }}")

    assert template.optional_paths == {("a", "b"), ("d",)}


class Recording(Mapping[str, Any]):
    """Remembers what was asked of it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values_by_name = values
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.asked.append(name)
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


def test_only_the_roots_are_looked_up() -> None:
    names = Recording({"a": {"b": 1}, "c": 2, "unread": 3})

    assert evaluate("{{ a.b + c }}", names) == 3
    assert sorted(names.asked) == ["a", "c"]


@pytest.mark.parametrize(
    "error",
    [ReferenceNeeded(Reference(ref_id=RefId(7), type="db")), RetryableError("the store is away")],
)
def test_what_a_lazy_value_raises_passes_through(error: Exception) -> None:
    class Lazy(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise error

        def __iter__(self) -> Iterator[str]:
            raise error

        def __len__(self) -> int:
            raise error

    for template in ("{{ s.a }}", "{{ s['a'] > 1 }}", "a {{ s.a.b }}", "{{ s | length }}"):
        with pytest.raises(type(error)) as raised:
            render({"x": template}, {"s": Lazy()}, step="s", field="f")
        assert raised.value is error


def test_rendering_goes_into_containers_but_not_into_keys() -> None:
    value = {"{{ ctx.total }}": ["{{ ctx.total }}", {"a": "n={{ ctx.total }}"}, 5, None]}

    assert render(value, NAMES, step="s", field="f") == {
        "{{ ctx.total }}": [3, {"a": "n=3"}, 5, None]
    }
    assert value["{{ ctx.total }}"][0] == "{{ ctx.total }}"


@given(PLAIN_DATA)
def test_rendering_plain_data_gives_the_same_object(value: Any) -> None:
    assert render(value, {}, step="s", field="f") is value


@given(PLAIN_DATA)
def test_an_expression_gives_any_plain_value_back(value: Any) -> None:
    assert evaluate("{{ value }}", {"value": value}) is value


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("{{ zzz }}", "tool"),
        ({"url": "{{ zzz }}"}, "tool.url"),
        ({"params": {"page": ["x", "{{ zzz }}"]}}, "tool.params.page[1]"),
        ({"ctx.total": "{{ zzz }}"}, "tool.ctx.total"),
    ],
)
def test_an_error_names_the_step_the_field_and_the_name(value: Any, field: str) -> None:
    with pytest.raises(TemplateError) as raised:
        render(value, NAMES, step="fetch", field="tool")

    assert str(raised.value) == f"step 'fetch', field '{field}': `zzz` is not defined"
    assert (raised.value.step, raised.value.field, raised.value.name) == ("fetch", field, "zzz")


@pytest.mark.parametrize(
    "guard",
    [
        "false",
        "False",
        "0",
        "no",
        "none",
        "None",
        "",
        "  ",
        False,
        None,
        "{{ false }}",
        "{{ 0 }}",
        "{{ none }}",
        "{{ [] }}",
        "{{ 'no' }}",
        "{{ ctx.total > 5 }}",
        "{% if false %}x{% endif %}",
    ],
)
def test_a_guard_is_false(guard: str | bool | None) -> None:
    assert is_true(guard, NAMES, step="s", field="when") is False


@pytest.mark.parametrize(
    "guard",
    ["true", "yes", "1", True, "{{ true }}", "{{ rows }}", "{{ ctx.total > 2 }}", "{{ 'off' }}"],
)
def test_a_guard_is_true(guard: str | bool) -> None:
    assert is_true(guard, NAMES, step="s", field="when") is True


def test_a_guard_that_fails_is_not_false() -> None:
    with pytest.raises(TemplateError, match=r"field 'when': `zzz` is not defined"):
        is_true("{{ zzz }}", NAMES, step="s", field="when")


def test_a_template_is_compiled_once_and_the_cache_has_an_end() -> None:
    assert compile_template("{{ once }}") is compile_template("{{ once }}")
    assert compile_template.cache_info().maxsize == COMPILED_MAX
