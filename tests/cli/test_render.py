"""`noetl render`: what a step would run with."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.stacks import Answer, noetl

PLAYBOOK = """\
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: p}
keychain: [{name: api, kind: bearer}]
workload: {url: "http://here", user: {name: Ada}}
workflow:
  - step: fetch
    input: {who: "{{ workload.user.name }}", region: "{{ region }}"}
    tool:
      kind: http
      url: "{{ url }}/{{ input.who }}"
      headers: {a: "Bearer {{ keychain.api.token }}"}
    set: {ctx.total: "{{ output.total }}"}
    next: {arcs: [{step: each}, {step: pipe}, {step: claim}]}
  - step: each
    loop: {in: "{{ fetch.rows }}", iterator: row}
    input: {id: "{{ row.id }}", at: "{{ iter.index }}", total: "{{ ctx.total }}"}
    tool: {kind: noop}
    sink: {tool: postgres, table: t, args: {id: "{{ output.id }}"}}
  - step: pipe
    tool:
      - {name: first, kind: python, code: "return {{ nothing }}"}
      - {name: second, kind: noop, value: "{{ _prev.n + 1 }}"}
  - step: claim
    loop: {cursor: {auth: pg, claim: "select {{ __frame_max_rows }}"}, iterator: row}
    tool: {kind: noop, value: "{{ row.id }}"}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(PLAYBOOK)
    return path


def rendered(file: Path, step: str, *options: str) -> dict[str, Any]:
    answer = noetl("render", file, step, *options, "--json")
    assert answer.returncode == 0, answer
    body: dict[str, Any] = json.loads(answer.stdout)
    return body


def refused(file: Path, *options: str) -> Answer:
    answer = noetl("render", file, *options)
    assert answer.returncode == 1, answer
    return answer


def test_a_step_is_shown_with_its_input_and_its_tool(file: Path) -> None:
    body = rendered(file, "fetch", "--set", "region=eu", "--set", "user.name=Bob")

    assert body["input"] == {"who": "Bob", "region": "eu"}
    (task,) = body["tool"]
    assert task["config"]["url"] == "http://here/Bob"


def test_a_credential_is_never_opened(file: Path) -> None:
    body = rendered(file, "fetch", "--set", "region=eu")

    assert body["tool"][0]["config"]["headers"] == {"a": "Bearer ***"}


def test_a_loop_shows_its_first_items_and_the_step_with_one_of_them(file: Path) -> None:
    rows = json.dumps({"rows": [{"id": n} for n in range(5)]})
    options = ("--result", f"fetch={rows}", "--ctx", '{"total": 9}', "--result", 'each={"id": 3}')

    body = rendered(file, "each", *options, "--index", "2")

    assert body["loop"] == {"total": 5, "first": [{"id": 0}, {"id": 1}, {"id": 2}]}
    assert body["input"] == {"id": 2, "at": 2, "total": 9}
    assert body["sink"]["args"] == {"id": 3}
    assert rendered(file, "each", *options, "--item", '{"id": "x"}')["input"]["id"] == "x"


def test_a_result_may_stand_in_a_file(file: Path, tmp_path: Path) -> None:
    result = tmp_path / "fetch.json"
    result.write_text('{"rows": [{"id": 1}]}')
    options = ("--result", f"fetch=@{result}", "--ctx", '{"total": 1}', "--result", "each={}")

    answer = noetl("render", file, "each", *options)

    assert "id: 1" in answer.stdout


def test_later_tasks_of_a_pipeline_read_the_results_of_earlier_ones(file: Path) -> None:
    body = rendered(file, "pipe", "--result", 'pipe.first={"n": 1}')

    assert body["tool"][0]["config"] == {"code": "return {{ nothing }}"}
    assert body["tool"][1]["config"] == {"value": 2}


def test_a_cursor_loop_shows_its_claim(file: Path) -> None:
    body = rendered(file, "claim", "--item", '{"id": 4}')

    assert body["cursor"]["claim"] == "select 50"
    assert body["tool"][0]["config"] == {"value": 4}


@pytest.mark.parametrize(
    ("step", "options", "field", "name", "hint"),
    [
        ("fetch", (), "input.region", "region", "--set region=VALUE"),
        ("each", (), "loop.in", "fetch", "--result fetch=JSON"),
        ("each", ("--result", "fetch={}"), "loop.in", "fetch.rows", "--result fetch=JSON"),
        ("each", ("--item", '{"id": 1}'), "input.total", "ctx.total", "--ctx JSON"),
        ("each", ("--result", 'fetch={"rows": []}'), "loop.in", "0 items", "--item JSON"),
        ("pipe", (), "tool.second.value", "_prev", "--result pipe.TASK=JSON"),
    ],
)
def test_what_cannot_be_rendered_names_field_name_and_the_option_that_helps(
    file: Path, step: str, options: tuple[str, ...], field: str, name: str, hint: str
) -> None:
    said = refused(file, step, *options).stderr

    assert f"step `{step}`, field `{field}`" in said
    assert name in said
    assert hint in said


@pytest.mark.parametrize(
    "options",
    [
        ("fetsh",),
        ("fetch", "--ctx", "{"),
        ("fetch", "--ctx", "[]"),
        ("fetch", "--result", "nobody=1"),
        ("fetch", "--result", "fetch"),
        ("fetch", "--result", "fetch=@/no/such/file"),
        ("each", "--item", "{"),
    ],
    ids=" ".join,
)
def test_wrong_options_are_refused(file: Path, options: tuple[str, ...]) -> None:
    answer = noetl("render", file, *options)

    assert answer.returncode == 2
    assert answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_schema_of_playbooks_is_printed() -> None:
    root = Path(__file__).parents[2]

    assert noetl("schema").stdout == (root / "schema" / "playbook.schema.json").read_text()


def test_validate_shows_warnings_and_still_says_that_it_is_valid(file: Path) -> None:
    answer = noetl("validate", file)

    assert answer.returncode == 0
    assert "warning: " in answer.stderr
    assert answer.stdout == f"{file}: valid\n"
