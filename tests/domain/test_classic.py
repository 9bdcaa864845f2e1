"""Playbooks of the classic dialect: what each piece becomes, and where its errors point."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noetl_core.domain.classic import is_classic, modernise
from noetl_core.domain.errors import PlaybookInvalidError, Problem
from noetl_core.domain.parse import parse_playbook, warnings_of
from noetl_core.domain.reader import Report
from noetl_core.domain.yaml_tree import Mapping, Node, Sequence, data_of, read_tree

HEAD = "apiVersion: noetl.io/v1\nkind: Playbook\nmetadata: {name: p}\n"


def indented(text: str) -> str:
    return "\n".join("    " + line for line in text.strip("\n").splitlines())


def converted(text: str) -> tuple[Any, list[Problem]]:
    tree, problems = read_tree(text, file="f.yaml")
    return data_of(modernise(tree, Report(problems))), problems


def step(body: str) -> Any:
    """The one step with this body, in the current dialect."""
    document, problems = converted(f"{HEAD}workflow:\n  - step: a\n{indented(body)}\n")
    assert problems == []
    found = document["workflow"][0]
    assert found.pop("step") == "a"
    return found


def following(body: str) -> Any:
    return step(body)["next"]


@pytest.mark.parametrize(
    ("body", "modern"),
    [
        (
            "tool: http\nurl: x\nparams: {page: 1}\npayload: {a: 1}\ntimeout: 5",
            {
                "tool": {
                    "kind": "http",
                    "url": "x",
                    "params": {"page": 1},
                    "payload": {"a": 1},
                    "timeout": 5,
                }
            },
        ),
        ("type: python\ncode: x = 1", {"tool": {"kind": "python", "code": "x = 1"}}),
        (
            "tool: postgres\nconnection: pg\ncommand: select 1",
            {"tool": {"kind": "postgres", "command": "select 1", "auth": "pg"}},
        ),
        (
            "tool: postgres\nauth: {type: postgres, credential: pg}\nquery: select 1",
            {"tool": {"kind": "postgres", "query": "select 1", "auth": "pg"}},
        ),
        (
            "tool: workbook\nname: score\nargs: {x: 1}",
            {"tool": {"kind": "workbook", "name": "score"}, "input": {"x": 1}},
        ),
        ("type: workbook\ntask: score", {"tool": {"kind": "workbook", "name": "score"}}),
        ("tool: homemade\nanything: 1", {"tool": {"kind": "homemade", "anything": 1}}),
        ("type: start", {}),
        ("tool: router\ndesc: x", {"desc": "x"}),
        (
            "tool: http\nurl: x\ndata: {page: 1}",
            {"tool": {"kind": "http", "url": "x", "params": {"page": 1}}},
        ),
        (
            "tool: http\nurl: x\nmethod: post\ndata: {page: 1}",
            {"tool": {"kind": "http", "url": "x", "method": "post", "data": {"page": 1}}},
        ),
        (
            "tool: http\nurl: x\nmethod: POST\ndata: {query: {page: 1}, body: {a: 1}}",
            {
                "tool": {
                    "kind": "http",
                    "url": "x",
                    "method": "POST",
                    "params": {"page": 1},
                    "body": {"a": 1},
                }
            },
        ),
        ("desc: only a mark", {"desc": "only a mark"}),
        (
            "tool: {kind: python, code: x = 1, args: {n: 1}}",
            {"tool": {"kind": "python", "code": "x = 1", "input": {"n": 1}}},
        ),
        (
            "tool:\n  - get: {tool: http, url: x, connection: api}\n  - {kind: noop}",
            {"tool": [{"get": {"url": "x", "kind": "http", "auth": "api"}}, {"kind": "noop"}]},
        ),
    ],
)
def test_a_tool_gets_the_fields_that_stood_beside_it(body: str, modern: Any) -> None:
    assert step(body) == modern


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ("args: {a: 1}", {"a": 1}),
        (
            "with: {a: 1, b: 1, c: 1}\npayload: {b: 2, c: 2}\ninput: {c: 3}",
            {"a": 1, "b": 2, "c": 3},
        ),
        ("input: {c: 3}\ndata: {b: 2, c: 2}\nwith: {b: 1}", {"b": 2, "c": 3}),
        ("args:", {}),
    ],
)
def test_what_is_handed_over_is_input_and_the_nearer_word_wins(body: str, given: Any) -> None:
    assert step(f"tool: python\ncode: x\n{body}")["input"] == given


@pytest.mark.parametrize(
    ("loop", "modern"),
    [
        (
            '{collection: "{{ users }}", element: user, mode: async, concurrency: 10}',
            {
                "in": "{{ users }}",
                "iterator": "user",
                "spec": {"mode": "parallel", "max_in_flight": 10},
            },
        ),
        ("{collection: [1]}", {"in": [1], "spec": {"mode": "sequential"}}),
        (
            "{collection: [1], concurrency: 3}",
            {"in": [1], "spec": {"max_in_flight": 3, "mode": "parallel"}},
        ),
        (
            "{collection: [1], mode: fanout, chunk_size: 5}",
            {"in": [1], "spec": {"mode": "fanout", "chunk_size": 5}},
        ),
        (
            "{in: [1], iterator: x, mode: sequential}",
            {"in": [1], "iterator": "x", "spec": {"mode": "sequential"}},
        ),
        ("{in: [1], spec: {mode: parallel}}", {"in": [1], "spec": {"mode": "parallel"}}),
    ],
)
def test_a_loop(loop: str, modern: Any) -> None:
    assert step(f"tool: noop\nloop: {loop}")["loop"] == modern


def test_an_iterator_is_a_loop_over_its_task_that_saves_each_element() -> None:
    assert step(
        """
type: iterator
collection: "{{ workload.cities }}"
element: city
mode: async
concurrency: 4
task:
  task: fetch
  tool: http
  url: x
  args: {city: "{{ city.name }}"}
  save: {storage: postgres, table: weather, auth: pg}
  retry: 3
next: end
"""
    ) == {
        "loop": {
            "in": "{{ workload.cities }}",
            "iterator": "city",
            "spec": {"mode": "parallel", "max_in_flight": 4},
        },
        "tool": {"kind": "http", "name": "fetch", "url": "x", "input": {"city": "{{ city.name }}"}},
        "sink": {"tool": "postgres", "table": "weather", "auth": "pg"},
        "retry": 3,
        "next": {"arcs": [{"step": "end"}]},
    }


@pytest.mark.parametrize(
    ("retry", "modern"),
    [
        ("true", True),
        ("3", 3),
        (
            "{max_attempts: 3, backoff: linear, delay: 2, retry_when: '{{ error.retryable }}'}",
            {
                "on_error": {
                    "max_attempts": 3,
                    "backoff": "linear",
                    "initial_delay": 2,
                    "when": "{{ error.retryable }}",
                }
            },
        ),
        (
            "{retry_when: '{{ a or b }}', stop_when: '{{ c }}'}",
            {"on_error": {"when": "{{ (a or b) and not (c) }}"}},
        ),
        ("{stop_when: '{{ c }}'}", {"on_error": {"when": "{{ not (c) }}"}}),
        ("{backoff_multiplier: 2.0}", {"on_error": {"backoff": "exponential"}}),
        (
            "{on_error: {delay: 1}, on_success: {while: '{{ response.more }}'}}",
            {"on_error": {"initial_delay": 1}, "on_success": {"while": "{{ response.more }}"}},
        ),
    ],
)
def test_a_retry(retry: str, modern: Any) -> None:
    assert step(f"tool: noop\nretry: {retry}")["retry"] == modern


@pytest.mark.parametrize(
    ("sink", "modern"),
    [
        (
            "{tool: postgres, table: t, connection: db}",
            {"tool": "postgres", "table": "t", "auth": "db"},
        ),
        (
            "{storage: postgres, table: t, mode: insert, key: id, data: {id: '{{ result.id }}'}}",
            {
                "tool": "postgres",
                "table": "t",
                "mode": "append",
                "key": ["id"],
                "args": {"id": "{{ output.id }}"},
            },
        ),
        (
            "{tool: {kind: postgres, auth: db, table: t}, args: '{{ data }}'}",
            {"tool": "postgres", "auth": "db", "table": "t", "args": "{{ output.data }}"},
        ),
    ],
)
@pytest.mark.parametrize("word", ["sink", "save"])
def test_a_sink(word: str, sink: str, modern: Any) -> None:
    assert step(f"tool: noop\n{word}: {sink}")["sink"] == modern


def test_variables_are_set_in_ctx_when_the_step_has_ended() -> None:
    found = step(
        """
tool: python
code: "result = '{{ vars.raw }}'"
args: {before: "{{ vars.total }}"}
vars:
  total: "{{ result.data.total + this.extra | default(response['n']) }}"
  rows: "{{ data }}"
  kept: "{{ x.result ~ f(result=1) ~ (y | data) ~ 'result' }}"
  text: result and data
set: {ctx.other: 1}
"""
    )

    assert found["set"] == {
        "ctx.other": 1,
        "ctx.total": "{{ output.data.total + output.extra | default(output['n']) }}",
        "ctx.rows": "{{ output.data }}",
        "ctx.kept": "{{ x.result ~ f(result=1) ~ (y | data) ~ 'result' }}",
        "ctx.text": "result and data",
    }
    assert found["input"] == {"before": "{{ ctx.total }}"}
    assert found["tool"]["code"] == "result = '{{ vars.raw }}'"


def test_a_name_of_the_playbooks_own_is_not_taken_for_the_result() -> None:
    document, _ = converted(
        f"""{HEAD}
workload: {{data: 1}}
workflow:
  - step: result
    tool: noop
    args: {{response: 1}}
    vars: {{x: "{{{{ result.a ~ data ~ response ~ this }}}}"}}
"""
    )

    assert document["workflow"][0]["set"] == {"ctx.x": "{{ result.a ~ data ~ response ~ output }}"}


def arcs(*arcs: Any, mode: str = "") -> Any:
    return {"spec": {"mode": mode}, "arcs": list(arcs)} if mode else {"arcs": list(arcs)}


@pytest.mark.parametrize(
    ("text", "modern"),
    [
        ("b", arcs({"step": "b"})),
        ("[b]", arcs({"step": "b"})),
        ("{step: b, args: {x: 1}}", arcs({"step": "b", "input": {"x": 1}})),
        ("[b, {step: c}]", arcs({"step": "b"}, {"step": "c"}, mode="inclusive")),
        (
            "[{step: b, when: '{{ x }}'}, {step: c, when: '{{ y }}'}]",
            arcs(
                {"step": "b", "when": "{{ x }}"}, {"step": "c", "when": "{{ y }}"}, mode="exclusive"
            ),
        ),
        (
            "[{when: '{{ x }}', then: [{step: b}]}, {else: [{step: c}]}]",
            arcs({"step": "b", "when": "{{ x }}"}, {"step": "c"}, mode="exclusive"),
        ),
        (
            "[{when: '{{ x }}', then: b, else: c}]",
            arcs({"step": "b", "when": "{{ x }}"}, {"step": "c"}, mode="exclusive"),
        ),
        (
            "[{when: '{{ x }}', then: b}, c]",
            arcs({"step": "b", "when": "{{ x }}"}, {"step": "c"}, mode="exclusive"),
        ),
        (
            "[{when: '{{ x }}', then: [b, c], args: {n: 1, m: 1}}]",
            arcs(
                {"step": "b", "input": {"n": 1, "m": 1}, "when": "{{ x }}"},
                {"step": "c", "input": {"n": 1, "m": 1}, "when": "{{ x }}"},
                mode="inclusive",
            ),
        ),
        (
            "[{when: '{{ x }}', then: [{step: b, args: {n: 2}}], args: {n: 1, m: 1}}]",
            arcs({"step": "b", "input": {"n": 2, "m": 1}, "when": "{{ x }}"}),
        ),
        (
            "[{when: '{{ x }}', then: [b, c]}, {when: '{{ y or z }}', then: d}, {else: e}]",
            arcs(
                {"step": "b", "when": "{{ x }}"},
                {"step": "c", "when": "{{ x }}"},
                {"step": "d", "when": "{{ not (x) and (y or z) }}"},
                {"step": "e", "when": "{{ not (x) and not (y or z) }}"},
                mode="inclusive",
            ),
        ),
        (
            "[b, {when: '{{ x }}', then: c}]",
            arcs({"step": "b"}, {"step": "c", "when": "{{ x }}"}, mode="inclusive"),
        ),
        (
            "[{when: '{{ error.kind }}', then: [b, c]}, {else: d}]",
            arcs(
                {"step": "b", "when": "{{ error.kind }}"},
                {"step": "c", "when": "{{ error.kind }}"},
                {"step": "d", "when": "{{ event.name != 'step.failed' and not (error.kind) }}"},
                mode="inclusive",
            ),
        ),
        (
            "[{step: b, when: '{{ result.n > 1 }}'}]",
            arcs({"step": "b", "when": "{{ output.n > 1 }}"}),
        ),
        ("{arcs: [{step: b, args: {x: 1}}]}", arcs({"step": "b", "input": {"x": 1}})),
    ],
)
def test_where_a_step_goes(text: str, modern: Any) -> None:
    assert following(f"next: {text}") == modern


def test_a_document_of_the_oldest_kind() -> None:
    document, problems = converted(
        """
kind: Playbook
name: weather
path: examples/weather
version: "0.1.0"
workbook:
  - name: score
    type: python
    code: result = n
    args: {n: "{{ vars.n }}"}
workflow:
  - name: work
    type: workbook
    next: end
  - step: start
    next: work
"""
    )

    assert problems == []
    assert document == {
        "apiVersion": "noetl.io/v2",
        "kind": "Playbook",
        "metadata": {
            "name": "weather",
            "path": "examples/weather",
            "labels": {"version": "0.1.0"},
        },
        "executor": {"spec": {"entry_step": "start"}},
        "workbook": [
            {
                "name": "score",
                "tool": {"kind": "python", "code": "result = n", "input": {"n": "{{ ctx.n }}"}},
            }
        ],
        "workflow": [
            {
                "step": "work",
                "tool": {"kind": "workbook", "name": "work"},
                "next": {"arcs": [{"step": "end"}]},
            },
            {"step": "start", "next": {"arcs": [{"step": "work"}]}},
            {"step": "end"},
        ],
    }


@pytest.mark.parametrize(
    ("body", "message", "place"),
    [
        ("args: '{{ x }}'", "`args` must be a mapping of names to values, not the text", (6, 11)),
        ("vars: [a]", "`vars` must be a mapping of names to templates, not a list", (6, 11)),
        ("tool: noop\nretry: [{max_attempts: 2}]", "a list of retry policies", (7, 12)),
        ("tool: noop\nretry: {stop_when: 'x'}", "a guard beside `stop_when` must be one", (7, 24)),
        (
            "sink: {tool: postgres}\nsave: {tool: postgres}",
            "`save` and `sink` say the same",
            (7, 5),
        ),
        ("loop: {in: [], collection: []}", "`collection` and `in` say the same", (6, 20)),
        ("tool: iterator\ncollection: []", "an iterator needs `task`", (6, 11)),
        (
            "tool: iterator\ntask: {tool: noop}\nsink: {table: t}",
            "the sink of an iterator's whole result has no counterpart",
            (8, 5),
        ),
        (
            "tool: iterator\ntask: {tool: iterator, task: {tool: noop}}",
            "an iterator inside an iterator",
            (7, 11),
        ),
        ("next: [{when: '{{ x }}'}]", "a branch with `when` needs `then`", (6, 12)),
        ("next: [{else: b}]", "`else` without a `when` before it", (6, 13)),
        ("next: [5]", "a target cannot be the number 5", (6, 12)),
        ("next: [{stp: b}]", "a target cannot be a mapping", (6, 12)),
        ("next: [{when: '{{ x }}', then: {step: b, when: y}}]", "a guard inside `then`", (6, 36)),
        ("next: [{when: '{{ x }}', thn: b}]", "unknown key `thn` in a branch", (6, 30)),
        (
            "next: [{when: '{{ x }}', then: b}, c, {when: '{{ y }}', then: d}]",
            "a guarded branch after one without a guard",
            (6, 43),
        ),
        (
            "next: [{when: 'x', then: [b, c]}, {else: d}]",
            "a guard beside a branch with several targets must be one `{{ expression }}`",
            (6, 19),
        ),
    ],
)
def test_what_has_no_counterpart_is_an_error_with_its_place(
    body: str, message: str, place: tuple[int, int]
) -> None:
    _, problems = converted(f"{HEAD}workflow:\n  - step: a\n{indented(body)}\n")

    assert message in problems[0].message
    assert (problems[0].line, problems[0].column) == place
    assert problems[0].key


@pytest.mark.parametrize(
    ("body", "holder"),
    [
        ("tool: http\nurll: x", "tool"),
        ("tool: http\nurl: x\nzzz: 1", ""),
        ("tool: http\nurl: x\nnxt: b", ""),
        ("nonsense: 1", ""),
    ],
)
def test_a_key_that_nobody_knows_stays_for_the_parser_to_report(body: str, holder: str) -> None:
    unknown = body.splitlines()[-1].split(":")[0]

    found = step(body)

    assert unknown in (found[holder] if holder else found)


def places(node: Node, path: str = "") -> dict[str, tuple[int, int]]:
    found = {path: (node.line, node.column)}
    if isinstance(node, Mapping):
        for key, item in node.items.items():
            found |= places(item, f"{path}.{key}")
            found[f"{path}.{key}:"] = (node.keys[key].line, node.keys[key].column)
    if isinstance(node, Sequence):
        for number, item in enumerate(node.items):
            found |= places(item, f"{path}[{number}]")
    return found


def test_every_node_keeps_its_place() -> None:
    text = f"""{HEAD}workflow:
  - step: a
    tool: http
    url: "{{{{ vars.url }}}}"
    vars: {{n: "{{{{ result.n }}}}"}}
    next:
      - when: "{{{{ x }}}}"
        then: b
"""
    tree, problems = read_tree(text, file="f.yaml")

    found = places(modernise(tree, Report(problems)))

    assert found[".workflow[0].tool"] == (6, 11)
    assert found[".workflow[0].tool.url"] == (7, 10)
    assert found[".workflow[0].tool.url:"] == (7, 5)
    assert found[".workflow[0].set.ctx.n"] == (8, 15)
    assert found[".workflow[0].set.ctx.n:"] == (8, 12)
    assert found[".workflow[0].next.arcs[0].step"] == (11, 15)
    assert found[".workflow[0].next.arcs[0].when"] == (10, 15)


def test_the_tree_that_was_read_is_not_changed() -> None:
    text = f"{HEAD}workflow:\n  - &a {{step: a, tool: noop, args: {{x: 1}}, next: b}}\n  - *a\n"
    tree, _ = read_tree(text, file="f.yaml")
    before = data_of(tree)

    modernise(tree, Report([]))

    assert data_of(tree) == before


@pytest.mark.parametrize(
    ("text", "classic"),
    [
        ("{apiVersion: noetl.io/v1, workflow: []}", True),
        ("{apiVersion: noetl.io/v2, workflow: [{step: a, tool: noop}]}", True),
        ("{apiVersion: noetl.io/v2, workflow: [{step: a, type: noop}]}", True),
        ("{apiVersion: noetl.io/v2, workflow: [{step: a, next: b}]}", True),
        ("{apiVersion: noetl.io/v2, workflow: [{step: a, next: [b]}]}", True),
        ("{apiVersion: noetl.io/v2, workflow: [{step: a, loop: {collection: []}}]}", True),
        ("{apiVersion: noetl.io/v2, workflow: [{step: a, vars: {}}]}", True),
        ("{workbook: [{name: x, tool: noop}]}", True),
        ("{apiVersion: noetl.io/v2, workflow: [{step: a, tool: {kind: noop}}]}", False),
        ("{apiVersion: noetl.io/v2, workflow: [{step: a, next: {arcs: [{step: b}]}}]}", False),
        ("{apiVersion: noetl.io/v2, workflow: [{step: a, loop: {in: []}, retry: 3}]}", False),
        ("{workbook: [{name: x, tool: {kind: noop}}]}", False),
        ("{apiVersion: noetl.io/v2, workflow: [5, ~, []]}", False),
        ("[]", False),
        ("5", False),
    ],
)
def test_a_document_is_classic_by_its_version_or_by_any_of_its_shapes(
    text: str, classic: bool
) -> None:
    assert is_classic(read_tree(text, file="f.yaml")[0]) is classic


def test_the_current_dialect_is_its_own_counterpart() -> None:
    body = """
input: {a: "{{ ctx.a }}"}
loop: {in: "{{ b.rows }}", iterator: row, spec: {mode: fanout, max_in_flight: 5}}
tool: [{name: x, kind: http, url: x, data: {a: 1}}, {kind: python, code: x}]
retry: {on_error: {max_attempts: 3}}
sink: {tool: postgres, auth: pg, table: t, mode: upsert, key: [id], args: {id: 1}}
set: {ctx.x: "{{ output.data.x }}"}
next: {spec: {mode: inclusive}, arcs: [{step: b, when: "{{ ctx.x }}", input: {a: 1}}]}
"""
    text = f"apiVersion: noetl.io/v2\nkind: Playbook\nworkflow:\n  - step: a\n{indented(body)}\n"

    tree, problems = read_tree(text, file="f.yaml")

    assert not is_classic(tree)
    assert data_of(modernise(tree, Report(problems))) == data_of(tree)
    assert problems == []


CLASSIC = """
apiVersion: noetl.io/v1
kind: Playbook
metadata: {name: users}
workload: {api: "http://localhost", endpoints: [a, b]}
workbook:
  - name: score
    tool: python
    code: "result = {'score': n}"
    args: {n: 0}
workflow:
  - step: fetch
    tool: http
    url: "{{ workload.api }}/{{ endpoint }}"
    params: {page: 1}
    loop:
      collection: "{{ workload.endpoints }}"
      element: endpoint
      mode: async
      concurrency: 10
    retry:
      on_error: {max_attempts: 3, backoff: exponential, delay: 1}
      on_success:
        while: "{{ response.paging.hasMore }}"
        max_attempts: 100
        next_call: {params: {page: "{{ response.paging.page + 1 }}"}}
        collect: append
        merge_path: data
    sink: {tool: postgres, table: raw_data, connection: main_db, mode: append}
    vars: {failed: "{{ result.stats.failed }}"}
    next:
      - when: "{{ vars.failed == 0 }}"
        then: [{step: rate, args: {n: "{{ fetch.stats.total }}"}}]
      - else: end
  - step: start
    next: fetch
  - step: rate
    type: workbook
    name: score
    next: [end]
  - step: end
"""

MODERN = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: users}
executor: {spec: {entry_step: start}}
workload: {api: "http://localhost", endpoints: [a, b]}
workbook:
  - name: score
    tool: {kind: python, code: "result = {'score': n}", input: {n: 0}}
workflow:
  - step: fetch
    loop:
      in: "{{ workload.endpoints }}"
      iterator: endpoint
      spec: {mode: parallel, max_in_flight: 10}
    tool: {kind: http, url: "{{ workload.api }}/{{ endpoint }}", params: {page: 1}}
    retry:
      on_error: {max_attempts: 3, backoff: exponential, initial_delay: 1}
      on_success:
        while: "{{ response.paging.hasMore }}"
        max_attempts: 100
        next_call: {params: {page: "{{ response.paging.page + 1 }}"}}
        collect: append
        merge_path: data
    sink: {tool: postgres, table: raw_data, auth: main_db, mode: append}
    set: {ctx.failed: "{{ output.stats.failed }}"}
    next:
      spec: {mode: exclusive}
      arcs:
        - {step: rate, when: "{{ ctx.failed == 0 }}", input: {n: "{{ fetch.stats.total }}"}}
        - {step: end}
  - step: start
    next: {arcs: [{step: fetch}]}
  - step: rate
    tool: {kind: workbook, name: score}
    next: {arcs: [{step: end}]}
  - step: end
"""


def test_a_classic_playbook_is_the_same_playbook_as_its_modern_twin() -> None:
    playbook = parse_playbook(CLASSIC)

    assert playbook == parse_playbook(MODERN)
    assert warnings_of(playbook) == ()


KEYS = st.sampled_from(
    (
        *("step", "name", "tool", "type", "task", "kind", "url", "code"),
        *("args", "data", "with", "payload", "input", "connection", "auth", "loop"),
        *(
            "collection",
            "element",
            "mode",
            "concurrency",
            "chunk_size",
            "retry",
            "on_error",
            "stop_when",
        ),
        *("retry_when", "delay", "sink", "save", "storage", "key", "table", "vars"),
        *("set", "next", "when", "then", "else", "arcs", "spec", "version"),
        *("zz"),
    )
)
LEAVES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-1, 3)
    | st.sampled_from(["a", "end", "noop", "iterator", "workbook", "async", "{{ result.x }}", "{{"])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.dictionaries(KEYS, TREES, max_size=6), max_size=3), st.booleans())
def test_a_classic_workflow_of_any_shape_is_parsed_or_refused_with_places(
    steps: list[Any], in_workbook: bool
) -> None:
    workbook = json.dumps(steps if in_workbook else [])
    text = f"{HEAD}workbook: {workbook}\nworkflow: {json.dumps(steps)}\n"
    problems: list[Problem] = []
    try:
        parse_playbook(text)
    except PlaybookInvalidError as error:
        problems = error.problems

    assert all(1 <= problem.line <= 5 for problem in problems)
    assert all(problem.column >= 1 and problem.message for problem in problems)
