"""A template reaches nothing but its names, changes nothing, and cannot run away."""

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from noetl_core.domain.errors import TemplateError
from noetl_core.domain.sandbox import ITERATIONS_MAX, TEXT_MAX
from noetl_core.domain.template import compile_template

DUNDERS = sorted({*dir(object), *dir(int), *dir(dict), *dir(list), "__globals__", "__code__"})
DUNDERS = [name for name in DUNDERS if name.startswith("__")]


def names() -> dict[str, Any]:
    return {"d": {"a": 1, "l": [3, 1]}, "l": [3, 1, 2], "s": "text", "n": 7, "none": None}


def evaluate(text: str) -> Any:
    return compile_template(text).evaluate(names())


@given(
    st.sampled_from(["d", "l", "s", "n", "d.l", "s.upper", "range", "(l | map('string'))"]),
    st.sampled_from(DUNDERS),
    st.sampled_from(["{{{{ {0}.{1} }}}}", "{{{{ {0}['{1}'] }}}}", "{{{{ {0} | attr('{1}') }}}}"]),
)
def test_no_private_attribute_can_be_reached(subject: str, attribute: str, form: str) -> None:
    with pytest.raises(TemplateError):
        evaluate(form.format(subject, attribute))


@pytest.mark.parametrize(
    "text",
    [
        "{{ '{0.__class__}'.format(s) }}",
        "{{ '{0.__class__}' | format(s) ~ '{x.__class__}'.format_map({'x': s}) }}",
        "{{ l | map(attribute='__class__') | list }}",
        "{{ self }}",
        "{{ self.__init__ }}",
        "{{ ''.join.__self__ }}",
        "{{ (l | sort).__class__.__mro__ }}",
        "{% set x = s.__class__ %}{{ x }}",
    ],
)
def test_no_way_around_leads_inside(text: str) -> None:
    with pytest.raises(TemplateError):
        evaluate(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ l.append(1) }}",
        "{{ l.sort() }}",
        "{{ l.clear() }}",
        "{{ d.update({'a': 2}) }}",
        "{{ d.pop('a') }}",
        "{{ d.setdefault('z', 1) }}",
        "{{ d['l'].extend([1]) }}",
        "{{ (l | first) ~ l.reverse() }}",
        "{% set _ = l.insert(0, 1) %}",
        "{% set d.a = 2 %}",
    ],
)
def test_nothing_can_be_changed(text: str) -> None:
    given_names = names()

    with pytest.raises(TemplateError):
        compile_template(text).evaluate(given_names)
    assert given_names == names()


EXPRESSIONS = st.recursive(
    st.sampled_from(["d", "l", "s", "n", "d.a", "d.l", "l[0]", "1", "'x'", "[]", "none", "zzz"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "*", "~", "and", "in"]), inner),
        st.builds(
            "({} | {})".format,
            inner,
            st.sampled_from(
                ["list", "sort", "reverse", "unique", "tojson", "items", "first", "sum", "upper"]
            ),
        ),
        st.builds(
            "({}.{})".format,
            inner,
            st.sampled_from(["pop()", "clear()", "sort()", "keys()", "copy()", "a", "l"]),
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=200)
@given(EXPRESSIONS)
@example("(l | sort)")
def test_no_expression_changes_its_names_or_answers_twice_differently(expression: str) -> None:
    def attempt(given_names: dict[str, Any]) -> Any:
        try:
            return copy.deepcopy(compile_template("{{ " + expression + " }}").evaluate(given_names))
        except TemplateError as error:
            return error.reason

    first, second = names(), names()
    answers = attempt(first), attempt(second)

    assert answers[0] == answers[1]
    assert first == second == names()


@settings(max_examples=200)
@given(st.text(alphabet="{}%#| .()[]'\"abx01_-+~\n", max_size=40))
def test_arbitrary_text_compiles_or_is_refused(text: str) -> None:
    with contextlib.suppress(TemplateError):
        compile_template("{{" + text).evaluate(names())


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ 9**(9**9) }}",
        "{{ 9**4000 * 9**4000 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=999999999) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ 'a'.zfill(999999999) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ 'a\\nb' | indent(999999999) }}",
        "{{ range(10**9) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set a = 'x' * 9999999 %}{% set b = a + a %}{{ b }}",
        "{% set a = 'x' * 9999999 %}{% set b = a ~ a %}{{ b }}",
        "{% set a = 'x' * 9999999 %}{{ a }}{{ a }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{{ lipsum() }}",
        "{{ l | random }}",
        "{{ namespace(a=1) }}",
        "{{ cycler(1, 2) }}",
    ],
)
def test_nothing_runs_away_or_leaves_things_to_chance(text: str) -> None:
    with pytest.raises(TemplateError):
        evaluate(text)


def test_the_limits_leave_room_for_real_work() -> None:
    assert len(evaluate("{{ 'x' * 1000000 }}")) < TEXT_MAX
    assert evaluate("{% for i in range(1000) %}{% for j in range(10) %}.{% endfor %}{% endfor %}")
    assert ITERATIONS_MAX >= 100_000
    assert evaluate("{{ 2 ** 64 }}") == 2**64


@pytest.mark.parametrize(
    "expression",
    ["1 ~ (d|reverse)", "'%s' % (d|reverse)", "d|reverse|string", "'%s'|format(d|reverse)"],
)
def test_what_is_made_lazily_has_a_text_that_says_what_is_in_it(expression: str) -> None:
    text = compile_template("{{ " + expression + " }}").evaluate({"d": {"a": 1, "b": 2}})

    assert text.endswith("['b', 'a']")
