"""What templates read is known before anything runs."""

import pytest

from noetl_core.domain.analysis import Reads, pushed_paths, reads_of
from noetl_core.domain.ids import StepName
from noetl_core.domain.parse import parse_playbook
from noetl_core.domain.playbook import Playbook

HEAD = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: p}
workload: {api: x, shared: y}
workflow:
  - step: fetch
    tool: {kind: noop}
    set: {ctx.total: 1, ctx.deep.key: 2, ctx.shared: 3}
    next: {arcs: [{step: work}]}
"""


def book(step: str) -> Playbook:
    return parse_playbook(HEAD + step)


def reads(text: str, *, more: str = "") -> Reads:
    step = f"""
  - step: work
    {more}
    tool: {{kind: http, url: '{text}'}}
"""
    return reads_of(book(step), StepName("work"))


def expect(steps: str = "", *, ctx: str | None = "", payload: bool = False) -> Reads:
    """`ctx` is None for all of it."""
    keys = None if ctx is None else frozenset(ctx.split())
    return Reads(frozenset(StepName(name) for name in steps.split()), keys, payload)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("static", expect()),
        ("{{ fetch.url }}", expect("fetch")),
        ("{{ ctx.total }}", expect(ctx="total")),
        ("{{ ctx.deep.key }}", expect(ctx="deep")),
        ("{{ ctx }}", expect(ctx=None)),
        ("{{ ctx | tojson }}", expect(ctx=None)),
        ("{{ ctx[total] }}", expect(ctx=None, payload=True)),
        ("{{ workload.api }}", expect(payload=True)),
        ("{{ api }}", expect(payload=True)),
        ("{{ total }}", expect(ctx="total", payload=True)),
        ("{{ shared }}", expect(ctx="shared", payload=True)),
        ("{{ unknown }}", expect(payload=True)),
        ("{{ now() }}{{ execution_id }}", expect()),
        ("{{ work.url }}", expect("work")),
    ],
)
def test_a_tool_reads(text: str, expected: Reads) -> None:
    assert reads(text) == expected


def test_an_input_and_an_iterator_answer_for_their_names() -> None:
    assert reads("{{ input.api }}{{ api }}", more="input: {api: 1}") == expect()
    assert reads("{{ fetch }}", more="loop: {in: [1], iterator: fetch}") == expect()
    assert reads("{{ iter.row }}{{ row }}", more="loop: {in: [1], iterator: row}") == expect()


def test_an_input_reads_a_step_of_its_own_name() -> None:
    assert reads("{{ fetch }}", more='input: {fetch: "{{ fetch.rows }}"}') == expect("fetch")


def test_everything_the_worker_renders_counts() -> None:
    playbook = book("""
  - step: a
    tool: {kind: noop}
  - step: b
    tool: {kind: noop}
  - step: work
    tool:
      - name: one
        kind: noop
        input: {x: "{{ a.x }}"}
        set: {ctx.k: "{{ b.y }}"}
        spec: {policy: {rules: [{when: "{{ ctx.total > 1 }}", then: {do: fail}},
                                {else: {do: continue, set: {ctx.k: "{{ workload.api }}"}}}]}}
""")

    assert reads_of(playbook, StepName("work")) == expect("a b", ctx="total", payload=True)


def test_what_the_broker_renders_is_not_sent_to_the_worker() -> None:
    playbook = book("""
  - step: work
    loop: {in: "{{ fetch.rows }}"}
    tool: {kind: noop}
    set: {ctx.n: "{{ fetch.n }}"}
    next: {arcs: [{step: fetch, when: "{{ fetch.again }}"}]}
""")

    assert reads_of(playbook, StepName("work")) == expect()


def test_code_is_not_a_template() -> None:
    playbook = book("""
  - step: work
    tool: {kind: python, code: 'x = f"{{ {fetch} }}"'}
""")

    assert reads_of(playbook, StepName("work")) == expect()


def pushed(guard: str, *, more: str = "") -> dict[str, set[str]]:
    playbook = book(f"""
  - step: work
    {more}
    tool: {{kind: noop}}
    next: {{arcs: [{{step: fetch, when: "{guard}"}}]}}
""")
    found = {str(name): set(pushed_paths(playbook, name)) for name in playbook.steps}
    return {name: paths for name, paths in found.items() if paths}


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("{{ output.data.total > 0 }}", {"work": {"data.total"}}),
        ("{{ outcome.data.total > 0 }}", {"work": {"data.total"}}),
        ("{{ work.total }}", {"work": {"total"}}),
        ("{{ fetch.data.a.b and fetch.rows }}", {"fetch": {"data.a.b", "rows"}}),
        ("{{ output.status == 'ok' }}", {}),
        ("{{ output.error.kind == 'x' or event.name }}", {}),
        ("{{ output.http.status == 200 }}", {"work": {"http.status"}}),
        ("{{ fetch.rows[0].id }}", {"fetch": {"rows"}}),
        ("{{ fetch.rows | length }}", {"fetch": {"rows"}}),
        ("{{ fetch['a.b'].c }}", {"fetch": {""}}),
        ("{{ output.data['a.b'].c }}", {"work": {"data"}}),
        ("{{ fetch }}", {"fetch": {""}}),
        ("{{ ctx.total and api }}", {}),
    ],
)
def test_the_broker_routes_on(guard: str, expected: dict[str, set[str]]) -> None:
    assert pushed(guard) == expected


def test_a_loop_pushes_nothing() -> None:
    assert pushed("{{ output.data.x and work.stats.failed }}", more="loop: {in: [1]}") == {}


def test_set_blocks_and_collections_are_the_brokers_too() -> None:
    playbook = book("""
  - step: work
    loop: {in: "{{ fetch.rows }}"}
    tool: {kind: noop}
    set: {ctx.n: "{{ fetch.n }}"}
    next: {arcs: [{step: fetch, set: {ctx.m: "{{ fetch.m }}"}}]}
""")

    assert pushed_paths(playbook, StepName("fetch")) == {"rows", "n", "m"}
