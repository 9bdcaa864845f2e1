"""Text of a playbook to the model; every problem with its place."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noetl_core.domain.errors import PlaybookInvalidError, Problem
from noetl_core.domain.ids import StepName
from noetl_core.domain.parse import format_problem, parse_playbook, warnings_of
from noetl_core.domain.playbook import Playbook, Step, Task
from noetl_core.domain.yaml_tree import DEPTH_MAX, DOCUMENT_BYTES_MAX, data_of, read_tree

PLAYBOOKS = Path(__file__).parent / "playbooks"
EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE_FILES = [p for p in sorted(EXAMPLES.glob("*.yaml")) if not p.name.endswith(".test.yaml")]

HEAD = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: p}\n"
MINIMAL = HEAD + "workflow: [{step: a}]\n"


def problems_of(text: str) -> list[Problem]:
    with pytest.raises(PlaybookInvalidError) as raised:
        parse_playbook(text)
    return raised.value.problems


def step_of(text: str) -> Step:
    """The one step with this body."""
    body = "\n".join("    " + line for line in text.splitlines())
    return parse_playbook(f"{HEAD}workflow:\n  - step: a\n{body}\n").steps[StepName("a")]


@pytest.mark.parametrize("path", sorted(PLAYBOOKS.glob("bad/*.yaml")), ids=lambda path: path.stem)
def test_a_bad_playbook_gives_exactly_these_problems(path: Path) -> None:
    source = path.read_text()

    problems = problems_of(source)

    shown = [format_problem(problem, path.name, source) for problem in problems]
    assert "\n".join(shown) + "\n" == path.with_suffix(".txt").read_text()


@pytest.mark.parametrize(
    "path",
    [*sorted(PLAYBOOKS.glob("good/*.yaml")), *EXAMPLE_FILES],
    ids=lambda path: path.stem,
)
def test_a_good_playbook_has_no_problem_and_no_warning(path: Path) -> None:
    assert warnings_of(parse_playbook(path.read_text(), file=path.name)) == ()


@pytest.fixture(scope="module")
def shapes() -> Playbook:
    return parse_playbook((PLAYBOOKS / "good" / "shapes.yaml").read_text())


def tasks(playbook: Playbook, step: str) -> tuple[Task, ...]:
    return playbook.steps[StepName(step)].tool


def test_the_head_of_a_playbook(shapes: Playbook) -> None:
    assert shapes.path == "tests/shapes"
    assert shapes.metadata.labels == {"version": "1.10"}
    assert shapes.metadata.tags == ("a", "2")
    assert shapes.entry_step == "begin"
    assert list(shapes.steps) == ["begin", "pipe", "each", "join", "failed"]
    assert [entry.name for entry in shapes.keychain] == ["api"]


def test_data_is_what_json_can_say(shapes: Playbook) -> None:
    assert shapes.workload == {
        "url": "http://localhost",
        "pages": [1, 2],
        "country": "NO",
        "day": "2024-01-31",
        "none": None,
    }


def test_a_task_has_three_shapes_and_one_model(shapes: Playbook) -> None:
    assert [(t.label, t.kind) for t in tasks(shapes, "begin")] == [("task_0", "http")]
    assert [(t.label, t.kind) for t in tasks(shapes, "pipe")] == [
        ("first", "python"),
        ("second", "noop"),
        ("task_2", "postgres"),
    ]
    assert tasks(shapes, "pipe")[2].config == {"auth": "pg", "query": "select {{ first.token }}"}


def test_a_rule_has_three_shapes_and_one_model(shapes: Playbook) -> None:
    retry, jump, otherwise = tasks(shapes, "pipe")[0].rules

    assert (retry.then.do, retry.then.attempts, retry.then.delay) == ("retry", 5, 0.5)
    assert (jump.then.do, jump.then.to, jump.then.set) == (
        "jump",
        "previous",
        {"iter.again": False},
    )
    assert (otherwise.when, otherwise.then.do) == (None, "continue")
    assert otherwise.then.set == {"ctx.k": "{{ output.data.k }}"}
    assert [rule.then.do for rule in tasks(shapes, "pipe")[2].rules] == ["break"]


def test_rules_of_a_step_hold_for_tasks_without_their_own(shapes: Playbook) -> None:
    assert [rule.then.do for rule in tasks(shapes, "each")[0].rules] == ["fail"]


def test_a_timeout_of_its_own_goes_before_the_default(shapes: Playbook) -> None:
    assert [task.timeout_s for task in tasks(shapes, "pipe")] == [5400, 30, 30]
    assert tasks(shapes, "begin")[0].timeout_s == 10
    assert shapes.steps[StepName("begin")].spec.timeout_s == 300


def test_arcs_keep_their_order_guards_and_sets(shapes: Playbook) -> None:
    following = shapes.steps[StepName("begin")].next

    assert (following.spec.mode, following.spec.on_no_match) == ("inclusive", "fail")
    assert [(arc.step, arc.when, arc.set) for arc in following.arcs] == [
        ("pipe", "{{ ctx.total > 0 }}", {"ctx.from": "begin"}),
        ("each", "true", {}),
        ("failed", "{{ event.name == 'step.failed' }}", {}),
    ]


def test_a_loop_is_parallel_unless_it_says_otherwise(shapes: Playbook) -> None:
    loop = shapes.steps[StepName("each")].loop

    assert loop is not None
    assert (loop.collection, loop.iterator, loop.spec.mode) == (
        "{{ begin.rows }}",
        "row",
        "sequential",
    )
    assert shapes.steps[StepName("each")].spec.policy.failure.mode == "best_effort"
    plain = step_of("loop: {in: [1, 2]}\ntool: {kind: noop}").loop
    assert plain is not None
    assert (plain.spec.mode, plain.iterator, plain.collection) == ("parallel", "item", [1, 2])


def test_merge_keys_and_aliases_are_unfolded() -> None:
    playbook = parse_playbook((PLAYBOOKS / "good" / "anchors.yaml").read_text())

    assert playbook.workload["other"] == {"retries": 3, "url": "http://b"}
    assert [task.kind for task in tasks(playbook, "two")] == ["noop"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("1.5", 1.5),
        ("30s", 30),
        ("5m", 300),
        ("1h", 3600),
        ("7d", 604800),
        ("500ms", 0.5),
        ("1h30m", 5400),
        ("0", 0),
        ("36500d", 3_153_600_000),
    ],
)
def test_a_duration(text: str, seconds: float) -> None:
    assert step_of(f"spec: {{timeout: {text}}}").spec.timeout_s == seconds


@pytest.mark.parametrize("text", ["-1", "5x", "s", "5 m", "1h-30m", "[]", "true", "'{{ x }}'"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(PlaybookInvalidError, match="`timeout` must be a duration"):
        step_of(f"spec: {{timeout: {text}}}")


@pytest.mark.parametrize("text", ["36501d", "1.0e+15"])
def test_what_ends_when_there_are_no_dates_any_more_is_no_duration(text: str) -> None:
    with pytest.raises(PlaybookInvalidError, match="`ttl` must be a duration of 100 years at most"):
        step_of(f"output: {{store: {{ttl: {text}}}}}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("TRUE", True),
        ("~", None),
        ("", None),
        (".inf", ".inf"),
        ("1e999", "1e999"),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("!!int 1", 1),
    ],
)
def test_a_scalar_is_read_as_json_would(text: str, value: object) -> None:
    tree, problems = read_tree(f"x: {text}", file="f")

    assert data_of(tree) == {"x": value}
    assert problems == []


def test_a_key_is_always_a_text() -> None:
    assert data_of(read_tree("{on: 1, 2: 3, null: 4}", file="f")[0]) == {"on": 1, "2": 3, "null": 4}


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (laughs(12), "a playbook may have up to 100000 values, aliases unfolded"),
        ("[" * 50_000, f"a playbook may be {DEPTH_MAX} levels deep"),
        ("- &a0 []\n" + "".join(f"- &a{n} [*a{n - 1}]\n" for n in range(1, 99)), "levels deep"),
        ("x" * (DOCUMENT_BYTES_MAX + 1), "a playbook may have up to 1048576 bytes"),
        ("a: &a [*a]", "the alias `*a` stands inside itself"),
        ("a: *b", "the alias `*b` has no anchor"),
        ("a: !!binary aGk=", "the tag `binary` is not supported here"),
        ("a: !!python/object:os.system x", "the tag `python/object:os.system` is not supported"),
        ("\x00", "control characters are not allowed"),
        ("\ud800", "not valid Unicode"),
        ("", "the document is empty"),
        ("# nothing", "the document is empty"),
        ("~", "the document is empty"),
    ],
)
def test_a_document_that_is_not_read(text: str, message: str) -> None:
    (problem,) = problems_of(text)

    assert message in problem.message


@pytest.mark.parametrize(
    ("body", "message", "hint"),
    [
        (
            "tool: {kind: http, url: '{{ hots }}'}",
            "step `a`, field `tool.url`: `hots` is not defined in the playbook",
            "did you mean `host`?",
        ),
        (
            "tool: {kind: http, url: '{{ zzz }}'}",
            "step `a`, field `tool.url`: `zzz` is not defined in the playbook",
            "the payload of each request must bring it",
        ),
        (
            "tool: {kind: http, url: '{{ workload.zzz }}'}",
            "step `a`, field `tool.url`: `workload.zzz` has no default",
            "each request must bring it",
        ),
        (
            "tool: {kind: http, url: '{{ keychain.api.url }}'}",
            "step `a`, field `tool.url`: `keychain.api` is not listed in `keychain`",
            "",
        ),
        (
            "tool: {kind: python, code: 'x = {{ workload.host }}'}",
            "step `a`: `code` is code, templates in it are not rendered",
            "pass the value with `input`",
        ),
    ],
)
def test_what_a_request_may_still_mend_is_a_warning(body: str, message: str, hint: str) -> None:
    playbook = parse_playbook(f"{HEAD}workload: {{host: x}}\nworkflow:\n  - step: a\n    {body}\n")

    (warning,) = warnings_of(playbook)
    assert (warning.message, warning.hint, warning.severity) == (message, hint, "warning")
    assert warning.line == 7


def test_a_step_that_no_arc_leads_to_is_a_warning() -> None:
    playbook = parse_playbook(HEAD + "workflow:\n  - step: a\n  - step: b\n")

    (warning,) = warnings_of(playbook)
    assert warning.message == "the step `b` is never reached: no arc leads to it"
    assert (warning.line, warning.column) == (6, 5)


@pytest.mark.parametrize(
    "text",
    [
        "{{ host }}",
        "{{ total }}",
        "{{ b.rows }}",
        "{{ size }}{{ input.size }}",
        "{{ row.id }}{{ iter.row }}{{ iter.index }}",
        "{{ zzz | default(1) }}",
        "{{ zzz is defined and ctx.zzz is defined }}",
        "{{ execution_id }}{{ idempotency_key }}{{ uuid() }}{{ now() }}",
        "{% for x in rows %}{{ x }}{% endfor %}",
        "{{ range(3) }}",
    ],
)
def test_what_is_defined_gives_no_warning(text: str) -> None:
    playbook = parse_playbook(
        f"""{HEAD}
workload: {{host: x, rows: []}}
workflow:
  - step: a
    input: {{size: 1}}
    loop: {{in: [1], iterator: row}}
    tool: {{kind: http, url: "{text}"}}
    set: {{ctx.total: 1}}
    next: {{arcs: [{{step: b}}]}}
  - step: b
"""
    )

    assert warnings_of(playbook) == ()


@pytest.mark.parametrize("steps", ["[~]", "[[]]", "[{step: a}, ~]", "[{step: a, tool: [~]}]"])
def test_an_empty_entry_is_not_passed_over(steps: str) -> None:
    assert problems_of(f"{HEAD}workflow: {steps}")


def test_every_problem_is_in_the_error_and_in_order() -> None:
    with pytest.raises(PlaybookInvalidError) as raised:
        parse_playbook(HEAD + "zz: 1\nyy: 2\n", file="bad.yaml")

    assert [(p.line, p.key) for p in raised.value.problems] == [
        (1, "workflow"),
        (4, "zz"),
        (5, "yy"),
    ]
    assert "bad.yaml:4:1: unknown key `zz` in a playbook" in str(raised.value)


def test_a_problem_shows_its_line_with_a_caret() -> None:
    problem = Problem(message="m", line=2, column=3, hint="h", severity="warning")

    assert (
        format_problem(problem, "f.yaml", "a: 1\nb: 2\n")
        == "f.yaml:2:3: warning: m (h)\n  b: 2\n    ^"
    )
    assert format_problem(Problem(message="m"), "f.yaml", "") == "f.yaml:0:0: m"


YAML_TEXT = st.text(alphabet="abstep:{}[],-&*!'\"|>#%@ \n\t1~<?", max_size=60)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | YAML_TEXT)
def test_arbitrary_text_is_refused_as_invalid_and_nothing_else(text: str) -> None:
    with pytest.raises(PlaybookInvalidError) as raised:
        parse_playbook(text)
    assert raised.value.problems


KEYS = st.sampled_from(
    [
        "step",
        "desc",
        "spec",
        "input",
        "loop",
        "tool",
        "set",
        "next",
        "arcs",
        "when",
        "in",
        "iterator",
        "kind",
        "url",
        "name",
        "then",
        "else",
        "do",
        "policy",
        "rules",
        "timeout",
        "mode",
        "ctx.a",
        "zz",
    ]
)
LEAVES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-2, 10)
    | st.sampled_from(["a", "b", "noop", "http", "{{ a.b }}", "{{ ctx.a", "5m", "retry", ""])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.dictionaries(KEYS, TREES, max_size=6), max_size=3))
def test_a_workflow_of_any_shape_is_parsed_or_refused_with_places(steps: list[Any]) -> None:
    text = HEAD + "workflow: " + json.dumps(steps)
    problems: list[Problem] = []
    try:
        parse_playbook(text)
    except PlaybookInvalidError as error:
        problems = error.problems

    assert all(1 <= problem.line <= 4 for problem in problems)
    assert all(problem.column >= 1 and problem.message for problem in problems)


@pytest.mark.parametrize("text", ["[]", "", "~", '""', "- a", "1"])
def test_a_document_that_is_no_mapping_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(PlaybookInvalidError) as refused:
        parse_playbook(text)

    assert [problem.message for problem in refused.value.problems if problem.message]


def test_a_path_that_the_catalog_cannot_keep_is_refused_where_it_stands() -> None:
    (problem,) = problems_of(MINIMAL.replace("{name: p}", f"{{name: p, path: {'a' * 513}}}"))

    assert (problem.line, problem.column, problem.key) == (3, 27, "path")
    assert "512" in problem.message
    assert problems_of(MINIMAL.replace("{name: p}", r'{name: "a\0"}'))
