"""`noetl test`: playbooks with mocked tools, on the real core, without any backend."""

import json
import time
from pathlib import Path
from textwrap import indent

import pytest

from cli.stacks import Answer, noetl

EXAMPLES = Path(__file__).parents[2] / "examples"

HEAD = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: p}\n"


class Desk:
    """A folder with one playbook and tests of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def playbook(self, workflow: str, head: str = "") -> None:
        (self.folder / "p.yaml").write_text(f"{HEAD}{head}\nworkflow:\n{indent(workflow, '  ')}\n")

    def test(self, body: str, *options: str) -> Answer:
        file = self.folder / "p.test.yaml"
        body = indent(body, "    ").removeprefix("    ")
        file.write_text(f"playbook: p.yaml\ntests:\n  - name: it works\n    {body}\n")
        return noetl("test", file, *options)

    def passes(self, body: str) -> None:
        answer = self.test(body)
        assert answer.returncode == 0, answer.stdout + answer.stderr

    def fails(self, body: str) -> str:
        answer = self.test(body)
        assert answer.returncode == 1, answer.stdout + answer.stderr
        return answer.stdout


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.test.yaml")), ids=lambda file: file.stem)
def test_the_tests_of_the_examples_pass(file: Path) -> None:
    answer = noetl("test", file)

    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_a_folder_means_every_test_file_in_it() -> None:
    answer = noetl("test", EXAMPLES, "--json")

    body = json.loads(answer.stdout)
    assert {Path(test["file"]).name for test in body["tests"]} == {
        file.name for file in EXAMPLES.glob("*.test.yaml")
    }
    assert (body["passed"], body["failed"]) == (len(body["tests"]), 0)


def test_a_folder_without_tests_is_a_mistake(tmp_path: Path) -> None:
    answer = noetl("test", tmp_path)

    assert answer.returncode == 2
    assert "*.test.yaml" in answer.stderr


def test_what_is_different_is_shown_with_the_path_that_was_taken(desk: Desk) -> None:
    desk.playbook("""\
- step: a
  tool: {kind: http, url: x}
  set: {ctx.total: "{{ output.total }}"}
  next: {arcs: [{step: b, when: "{{ ctx.total > 5 }}"}, {step: c}]}
- {step: b}
- {step: c}""")

    said = desk.fails("""\
mocks: {a: {total: 3}}
expect: {path: [a, b], ctx: {total: 7}}""")

    assert "FAIL" in said
    assert "expected: a -> b\n        got:      a -> c" in said
    assert "ctx.total\n        expected: 7\n        got:      3" in said
    assert "path taken: a -> c" in said
    assert "0 passed, 1 failed" in said


def test_a_failure_that_nobody_expects_is_told_with_its_reason(desk: Desk) -> None:
    desk.playbook("- {step: a, tool: {kind: fail, message: out of paper}}")

    assert "FAILED (failed: out of paper)" in desk.fails("expect: {}")
    desk.passes("expect: {error: {kind: failed, message: paper}}")


def test_a_tool_without_a_mock_says_which_mock_to_add(desk: Desk) -> None:
    desk.playbook("""\
- {step: a, tool: {kind: http, url: x}, next: {arcs: [{step: b}]}}
- {step: b, tool: [{one: {kind: noop}}, {two: {kind: postgres, command: select 1}}]}""")

    assert "`mocks: {a: {result: ...}}`" in desk.fails("expect: {}")
    assert "`mocks: {b.two: {result: ...}}`" in desk.fails("mocks: {a: 1}")
    desk.passes("mocks: {a: 1, b.two: {rows: []}}")


def test_a_template_that_cannot_be_rendered_shows_up(desk: Desk) -> None:
    desk.playbook("""\
- {step: a, tool: {kind: http, url: x}, next: {arcs: [{step: b}]}}
- {step: b, input: {id: "{{ a.identifier }}"}, tool: {kind: http, url: x}}""")

    said = desk.fails("mocks: {a: {id: 1}, b: 1}")

    assert "template_rendering" in said
    assert "a.identifier" in said


def test_a_list_answers_item_by_item_and_attempt_by_attempt(desk: Desk) -> None:
    desk.playbook("""\
- step: a
  loop: {in: [x, y, z], iterator: it, spec: {max_in_flight: 2}}
  input: {of: "{{ it }}", at: "{{ iter.index }}"}
  tool: {kind: http, url: x}
  retry: {max_attempts: 2, initial_delay: 1h}""")
    started = time.monotonic()

    desk.passes("""\
mocks: {a: [10, {attempts: [{error: {kind: busy}}, 20]}, {result: [30]}]}
expect:
  calls: {a: 4}
  results: {a: [10, 20, [30]]}
  inputs: {a: [{of: x, at: 0}, {of: y}, {of: z}, {of: y}]}""")

    assert time.monotonic() - started < 30
    assert "has 2 answers, and there is none for item 2" in desk.fails("mocks: {a: [1, 2]}")


def test_a_fan_out_may_end_in_part(desk: Desk) -> None:
    desk.playbook("""\
- step: a
  loop: {in: [1, 2, 3], iterator: it, spec: {mode: fanout}}
  spec: {fanout: {max_shard_retries: 1}}
  tool: {kind: http, url: x}
  next: {arcs: [{step: b, when: "{{ fanin.status == 'partial' }}"}]}
- {step: b}""")

    desk.passes("""\
mocks: {a: [{when: "{{ it == 2 }}", error: {kind: broken}}, {result: ok}]}
expect: {path: [a, b], calls: {a: 4}, results: {a: [ok, null, ok]}}""")


def test_rules_of_a_pipeline_hold_and_their_delays_are_skipped(desk: Desk) -> None:
    desk.playbook("""\
- step: a
  tool:
    - name: one
      kind: http
      url: x
      spec:
        policy:
          rules:
            - {when: "{{ error.retryable }}", then: {do: retry, attempts: 3, delay: 1h}}
            - {else: {do: continue, set: {ctx.seen: "{{ output.data.n }}"}}}
    - {name: two, kind: python, code: x, input: {n: "{{ one.n + 1 }}"}}""")

    desk.passes("""\
mocks:
  a.one: [{error: {kind: busy, retryable: true}}, {n: 4}]
  a.two: done
expect:
  calls: {a: 1, a.one: 2, a.two: 1}
  inputs: {a.two: {n: 5}}
  ctx: {seen: 4}
  results: {a: {data: done, results: {one: {n: 4}}}}""")
    desk.passes("""\
mocks: {a: {all: at once}}
expect: {calls: {a: 1, a.one: 0}, results: {a: {all: at once}}}""")


def test_a_wait_ends_at_once_and_an_approval_needs_a_signal(desk: Desk) -> None:
    desk.playbook(
        """\
- {step: pause, tool: {kind: wait, seconds: 7d}, next: {arcs: [{step: ask}]}}
- step: ask
  tool: {kind: approval, message: sure?}
  next: {arcs: [{step: no, when: "{{ error.kind == 'denied' }}"}, {step: yes}]}
- {step: "yes"}
- {step: "no"}""".replace("{step: yes}", '{step: "yes"}').replace("{step: no,", '{step: "no",')
    )

    assert "add `signals: [{name: ask}]`" in desk.fails("expect: {}")
    desk.passes("""\
signals: [{name: ask, data: {note: fine}}]
expect: {path: [pause, ask, "yes"], results: {ask: {note: fine}}}""")
    desk.passes("""\
signals: [{name: ask, approved: false}]
expect: {path: [pause, ask, "no"]}""")
    desk.passes("mocks: {ask: {error: {kind: denied}}}\nexpect: {visited: ['no']}")


def test_a_child_playbook_is_mocked_like_any_tool(desk: Desk) -> None:
    desk.playbook("""\
- step: call
  tool: {kind: playbook, path: other}
  input: {a: 1}
  set: {ctx.status: "{{ output.execution_status }}", ctx.x: "{{ output.x }}"}""")

    desk.passes("""\
mocks: {call: {x: 5}}
expect: {ctx: {status: COMPLETED, x: 5}, inputs: {call: {a: 1}}, config: {call: {path: other}}}""")


def test_a_cursor_loop_claims_the_rows_of_its_mock(desk: Desk) -> None:
    desk.playbook("""\
- step: work
  loop: {cursor: {auth: pg, claim: "select {{ __frame_max_rows }}"}, iterator: row,
         spec: {max_in_flight: 1}}
  input: {id: "{{ row.id }}"}
  tool: {kind: http, url: x}""")

    assert "work.claim" in desk.fails("mocks: {work: 1}")
    desk.passes("""\
mocks: {work.claim: [[{id: 1}, {id: 2}], [{id: 3}]], work: fine}
expect:
  inputs: {work.task_0: [{id: 1}, {id: 2}, {id: 3}]}
  results: {work: [[fine, fine], [fine]]}""")


def test_a_sink_is_rendered_and_may_fail(desk: Desk) -> None:
    desk.playbook(
        """\
- step: a
  tool: {kind: http, url: x}
  sink:
    {tool: postgres, auth: "{{ keychain.pg.name }}", table: t, args: {id: "{{ output.id }}"}}""",
        head="keychain: [{name: pg}]",
    )

    desk.passes("""\
mocks: {a: {id: 7}}
expect: {config: {a.sink: {table: t, auth: "***", args: {$exact: {id: 7}}}}}""")
    desk.passes("""\
mocks: {a: {id: 7}, a.sink: {error: {kind: db_constraint}}}
expect: {error: {kind: db_constraint}}""")


def test_chunks_of_a_result_go_their_own_ways(desk: Desk) -> None:
    desk.playbook("""\
- step: rows
  tool: {kind: postgres, command: select 1, chunk_size: 2}
  next: {arcs: [{step: each, on: call.partial}]}
- step: each
  input: {rows: "{{ rows.data }}"}
  tool: {kind: noop}""")

    desk.passes("""\
mocks: {rows: {chunks: [[1, 2], [3]], result: {row_count: 3}}}
expect: {calls: {each: 2}, inputs: {each: [{rows: [1, 2]}, {rows: [3]}]}}""")


def test_an_execution_that_does_not_end_is_a_failed_test(desk: Desk) -> None:
    desk.playbook("- {step: a, tool: {kind: noop}, next: {arcs: [{step: a}]}}")

    assert "more than 10000 commands" in desk.fails("expect: {}")


@pytest.mark.parametrize(
    ("body", "place", "words"),
    [
        ("mock: {}", "4:5", ("unknown key `mock`", "did you mean `mocks`?")),
        ("mocks: {aa: 1}", "4:13", ("no step `aa`", "did you mean `a`?")),
        ("mocks: {a: {error: {knd: x}}}", "4:25", ("`knd`", "`kind`")),
        ("expect: {path: [a, b]}", "4:24", ("no step `b`",)),
        ("expect: {stats: FAILED}", "4:14", ("`stats`", "`status`")),
        ("expect: {status: DONE}", "4:22", ("COMPLETED or FAILED or CANCELLED",)),
        ("expect: {calls: {a: often}}", "4:25", ("a number",)),
        ("signals: [{nme: x}]", "4:16", ("`nme`",)),
    ],
)
def test_a_wrong_test_file_is_refused_with_line_and_key(
    desk: Desk, body: str, place: str, words: tuple[str, ...]
) -> None:
    desk.playbook("- {step: a, tool: {kind: noop}}")

    answer = desk.test(body)

    assert answer.returncode == 2, answer
    assert f"p.test.yaml:{place}: " in answer.stderr
    assert all(word in answer.stderr for word in words), answer.stderr


def test_a_wrong_playbook_is_refused_with_its_own_lines(desk: Desk) -> None:
    desk.playbook("- {step: a, tol: {kind: noop}}")

    answer = desk.test("expect: {}")

    assert answer.returncode == 2
    assert "p.yaml:6:15: unknown key `tol`" in answer.stderr


def test_a_playbook_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "x.test.yaml"
    file.write_text("playbook: nowhere.yaml\ntests: [{name: a}]\n")

    answer = noetl("test", file)

    assert answer.returncode == 2
    assert "nowhere.yaml" in answer.stderr


def test_json_says_every_difference(desk: Desk) -> None:
    desk.playbook("- {step: a, tool: {kind: noop, value: {n: true}}}")

    answer = desk.test("expect: {results: {a: {n: 1}}}", "--json")

    (test,) = json.loads(answer.stdout)["tests"]
    assert answer.returncode == 1
    assert not test["passed"]
    assert test["differences"] == [{"place": "results.a.n", "expected": "1", "got": "true"}]
