"""schema/playbook.schema.json says what the parser says, as far as a schema can."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from noetl_core.domain.classic import is_classic
from noetl_core.domain.errors import PlaybookInvalidError
from noetl_core.domain.json_schema import playbook_schema
from noetl_core.domain.parse import parse_playbook
from noetl_core.domain.parse_call import SINK_TOOL_FIELDS
from noetl_core.domain.tools import KINDS_TO_COME, TOOLS
from noetl_core.domain.yaml_tree import data_of, read_tree

ROOT = Path(__file__).parents[2]
PLAYBOOKS = Path(__file__).parent / "playbooks"
UNKNOWN = "zzzzz"

SCHEMA = playbook_schema()
VALIDATOR = Draft202012Validator(SCHEMA)

GOOD = [
    path
    for folder in ("examples", "tests/domain/playbooks/good", "tests/fixtures")
    for path in sorted((ROOT / folder).glob("**/*.yaml"))
    if not path.name.endswith(".test.yaml")
]

EVERYTHING = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: all}
executor: {spec: {policy: {defaults: {timeout_s: 30}}}}
keychain: [{name: api}]
workbook: [{name: score, tool: {kind: noop, spec: {policy: {rules: []}}}}]
workflow:
  - step: a
    spec:
      fanout: {fail_fast: true}
      placement: {labels: {gpu: true}, wait: 5s}
      policy:
        failure: {mode: best_effort}
        rules: [{when: "{{ true }}", then: {do: fail}}]
        admit: {rules: [{when: "{{ true }}", then: {then: {allow: true}}}]}
    loop: {in: [1], spec: {frame: {max_rows: 5}}}
    tool: [{kind: noop}, {label: {kind: noop}}]
    retry: {on_error: {circuit: {failures: 3}}, on_success: {while: "{{ false }}"}}
    output: {store: {kind: db}}
    next: {spec: {mode: inclusive}, arcs: [{step: b}]}
  - step: b
    loop: {cursor: {claim: select 1}}
    tool: {kind: noop}
    retry: {max_attempts: 3}
"""


def read(path: Path) -> Any:
    return data_of(read_tree(path.read_text(), file=path.name)[0])


def errors_of(document: Any) -> list[str]:
    return [f"{list(e.absolute_path)}: {e.message}" for e in VALIDATOR.iter_errors(document)]


def document(**step: Any) -> dict[str, Any]:
    return {
        "apiVersion": "noetl.io/v2",
        "kind": "Playbook",
        "metadata": {"name": "p"},
        "workflow": [{"step": "a", **step}],
    }


def is_accepted(playbook: Any) -> bool:
    try:
        parse_playbook(json.dumps(playbook))
    except PlaybookInvalidError:
        return False
    return True


def keys_of_the_parser(playbook: Any) -> set[str]:
    """All that is valid beside the unknown key in this document, as the parser says."""
    with pytest.raises(PlaybookInvalidError) as raised:
        parse_playbook(json.dumps(playbook))
    hint = next(p.hint for p in raised.value.problems if p.key == UNKNOWN)
    return set(hint.removeprefix("valid: ").split(", "))


def test_the_file_is_what_the_code_gives() -> None:
    committed = json.loads((ROOT / "schema" / "playbook.schema.json").read_text())

    assert committed == SCHEMA, "run ./task docs and commit what changed"


def test_the_schema_is_a_valid_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_playbook_is_valid(path: Path) -> None:
    if is_classic(read_tree(path.read_text(), file=path.name)[0]):
        pytest.skip("the schema is about the current dialect")

    assert errors_of(read(path)) == []


@pytest.mark.parametrize(
    "name",
    [
        "calls",
        "keys",
        "not_a_mapping",
        "not_yet",
        "steps",
        "tasks",
        "templates",
        "types",
        "version",
    ],
)
def test_a_playbook_with_wrong_fields_is_not_valid(name: str) -> None:
    assert errors_of(read(PLAYBOOKS / "bad" / f"{name}.yaml"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tool": {"kind": "pyton", "code": "x"}},
        {"tool": {"kind": "python"}},
        {"tool": {"kind": "postgres", "command": "select 1", "query": "select 2"}},
        {"tool": []},
        {"tool": [{"kind": "wait", "seconds": 1}, {"kind": "noop"}]},
        {"tool": [{"kind": "noop"}, {"ask": {"kind": "approval"}}]},
        {"tool": {"kind": "wait", "seconds": 1}, "sink": {"tool": "postgres", "table": "t"}},
        {"tool": {"kind": "workbook"}},
        {"tool": {"kind": "noop", "name": "output"}},
        {"retry": 0},
        {"retry": {"on_success": {}}},
        {"retry": {"max_attempts": 3, "on_error": {}}},
        {"sink": {"tool": "postgres"}},
        {"sink": {"tool": "postgres", "table": "t", "mode": "upsert"}},
        {"sink": {"tool": "http", "table": "t"}},
        {"sink": {"tool": "s3", "bucket": "b", "libs": []}},
        {"set": {"total": 1}},
        {"set": {"iter.page": 1}},
        {"loop": {"in": "rows"}},
        {"loop": {}},
        {"loop": {"in": [1], "spec": {"mode": "cursor"}}},
        {"loop": {"cursor": {"claim": "x"}, "spec": {"mode": "parallel"}}},
        {"next": {"arcs": [{"step": "a", "when": "output.data.total > 0"}]}},
        {"spec": {"timeout": "5x"}},
        {"spec": {"policy": {"rules": [{"when": "{{ true }}"}]}}},
        {"spec": {"policy": {"rules": [{"else": {"do": "jump"}}]}}},
        {"spec": {"policy": {"rules": [{"when": "{{ true }}", "else": {"do": "fail"}}]}}},
        *({"tool": {"kind": kind}} for kind in sorted(KINDS_TO_COME)),
    ],
    ids=json.dumps,
)
def test_what_the_parser_refuses_field_by_field_the_schema_refuses_too(
    wrong: dict[str, Any],
) -> None:
    playbook = document(**wrong)

    assert not is_accepted(playbook)
    assert errors_of(playbook)


def sections(value: Any, schema: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every mapping of a document in which the schema allows certain keys only, with them."""
    schema = resolved(value, schema)
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from sections(item, schema.get("items", {}), (*place, index))
    elif isinstance(value, dict) and "properties" in schema:
        if schema.get("additionalProperties") is False:
            yield place, set(schema["properties"])
        for key, item in value.items():
            yield from sections(item, schema["properties"].get(key, {}), (*place, key))
    elif isinstance(value, dict) and "maxProperties" in schema:
        for key, item in value.items():
            yield from sections(item, schema["additionalProperties"], (*place, key))


def resolved(value: Any, schema: Any) -> Any:
    """The definition that is about this value."""
    reference = schema.get("$ref", "").rpartition("/")[2]
    if reference == "task" and isinstance(value, list):
        return {}
    if reference == "task":
        return resolved(value, {"$ref": "#/$defs/call"} if "kind" in value else labelled())
    if reference == "call":
        own, common = SCHEMA["$defs"][f"tool_{value['kind']}"], SCHEMA["$defs"]["call"]
        return {**own, "properties": {**own["properties"], **common["properties"]}}
    if reference:
        return resolved(value, SCHEMA["$defs"][reference])
    branches = [] if "properties" in schema else schema.get("anyOf", [])
    fitting = (found for branch in branches if fits(value, found := resolved(value, branch)))
    return next(fitting, schema)


def fits(value: Any, schema: Any) -> bool:
    if isinstance(value, list):
        return "items" in schema
    return isinstance(value, dict) and value.keys() <= schema.get("properties", {}).keys()


def labelled() -> Any:
    return SCHEMA["$defs"]["task"]["else"]


def with_unknown(playbook: Any, place: tuple[Any, ...]) -> Any:
    changed = json.loads(json.dumps(playbook))
    inner = changed
    for key in place:
        inner = inner[key]
    inner[UNKNOWN] = 1
    return changed


def test_every_section_has_the_keys_that_the_parser_knows() -> None:
    everything = data_of(read_tree(EVERYTHING, file="")[0])
    assert errors_of(everything) == []
    found = dict(sections(everything, SCHEMA))

    assert len(found) > 35
    for place, keys in found.items():
        playbook = with_unknown(everything, place)
        assert keys_of_the_parser(playbook) == keys, place
        assert errors_of(playbook), place


@pytest.mark.parametrize("kind", TOOLS)
def test_every_tool_has_the_keys_that_the_parser_knows(kind: str) -> None:
    playbook = document(tool={"kind": kind, UNKNOWN: 1})

    assert keys_of_the_parser(playbook) == set(SCHEMA["$defs"][f"tool_{kind}"]["properties"])


@pytest.mark.parametrize("tool", SINK_TOOL_FIELDS)
def test_every_sink_has_the_keys_that_the_parser_knows(tool: str) -> None:
    playbook = document(sink={"tool": tool, UNKNOWN: 1})
    rules = SCHEMA["$defs"]["sink"]["allOf"]
    (known,) = (
        rule["then"]["propertyNames"]["enum"]
        for rule in rules
        if rule["if"]["properties"].get("tool") == {"enum": [tool]}
    )

    assert keys_of_the_parser(playbook) == set(known)


def test_every_field_says_what_it_is_for() -> None:
    def silent(schema: Any, place: str) -> Iterator[str]:
        if isinstance(schema, dict):
            for key, field in schema.get("properties", {}).items():
                if "additionalProperties" in schema and field is not True and not _says(field):
                    yield f"{place}.{key}"
            for key, inner in schema.items():
                yield from silent(inner, f"{place}.{key}")
        elif isinstance(schema, list):
            for inner in schema:
                yield from silent(inner, place)

    assert list(silent(SCHEMA, "")) == []


def _says(field: dict[str, Any]) -> bool:
    references = [field, *field.get("anyOf", ())]
    names = [each["$ref"].rpartition("/")[2] for each in references if "$ref" in each]
    return "description" in field or any("description" in SCHEMA["$defs"][n] for n in names)


ODD: tuple[Any, ...] = (None, "", 0, 1, -1, 1.5, True, "yes", "5m", "{{ x }}", "a", {}, {"a": 1})
GUARDS: tuple[Any, ...] = ("{{ true }}", "no", " FALSE ", True, 0, None, "{% if a %}1{% endif %}")
TIMES: tuple[Any, ...] = (1, 0.5, "30s", " 1h30m ", "500ms", None)
FLAGS: tuple[Any, ...] = (True, False, "Yes", "off", None)
SETS: tuple[Any, ...] = ({}, {"ctx.a": 1}, {"ctx.a.b": "{{ workload.a }}"}, None)
DATA: tuple[Any, ...] = ({}, {"a": 1, "b": ["{{ workload.a }}"]}, None)


def some(*values: Any) -> st.SearchStrategy[Any]:
    """Mostly one of these, now and then anything."""
    return st.one_of(*[st.sampled_from(values)] * 12, st.sampled_from(ODD))


def fields(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=optional)


def with_(required: dict[str, Any], **optional: st.SearchStrategy[Any]) -> Any:
    return st.fixed_dictionaries({k: st.just(v) for k, v in required.items()}, optional=optional)


ACTIONS = fields(
    do=some("continue", "break", "fail", "retry"),
    attempts=some(1, 5),
    delay=some(*TIMES),
    backoff=some("fixed", None),
    set=some(*SETS, {"iter.a": 1}),
)
RULES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"then": ACTIONS}, optional={"when": some(*GUARDS)}),
        st.fixed_dictionaries({"else": ACTIONS}),
        st.fixed_dictionaries({"else": st.fixed_dictionaries({"then": ACTIONS})}),
    ),
    max_size=2,
)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "desc": some("text", None),
    "input": some(*DATA),
    "set": some(*SETS),
    "timeout": some(*TIMES),
    "spec": fields(timeout=some(*TIMES), policy=fields(rules=RULES)),
}
CALLS = st.one_of(
    with_({"kind": "noop"}, value=some(1), **COMMON),
    with_({"kind": "python", "code": "result = 1"}, libs=some(["json"]), **COMMON),
    with_({"kind": "http", "url": "{{ workload.a }}"}, method=some("GET"), **COMMON),
    with_({"kind": "acme.mailer"}, anything=some(1), **COMMON),
    with_({"kind": "wait", "seconds": 1}, until=some(None)),
)
TASKS = st.one_of(CALLS, st.fixed_dictionaries({"label": CALLS}))
ON_ERROR = fields(
    when=some(*GUARDS),
    max_attempts=some(1, 3, None),
    backoff=some("linear", None),
    initial_delay=some(*TIMES),
    jitter=some(*FLAGS),
    circuit=some({"failures": 3, "window": "1m"}, None),
)
STEPS = st.fixed_dictionaries(
    {"step": some("a", "b")},
    optional={
        "desc": some("text", None),
        "spec": fields(
            timeout=some(*TIMES),
            pool=some("cpu", "gpu-1"),
            join=some("any", "all", None),
            priority=some(-5, 5),
            loop_mode=some("fanout", None),
            fanout=some({"fail_fast": "no"}, {"max_shard_retries": 0}, None),
            policy=fields(
                failure=some({"mode": "best_effort"}, {}, None),
                rules=RULES,
                admit=some(
                    {
                        "rules": [
                            {"when": True, "then": {"allow": "yes"}},
                            {"else": {"allow": False}},
                        ]
                    },
                    {"rules": [{"else": {"then": {}}}]},
                    None,
                ),
            ),
        ),
        "input": some(*DATA),
        "loop": st.fixed_dictionaries(
            {"in": some([1, 2], "{{ workload.a }}")},
            optional={
                "iterator": some("row", "item"),
                "spec": fields(mode=some("sequential", "fanout"), max_in_flight=some(1, None)),
                "cursor": some(None, None, {"claim": "select 1"}),
            },
        ),
        "tool": st.one_of(TASKS, st.lists(CALLS, min_size=1, max_size=2)),
        "retry": st.one_of(
            some(3, True, False, None),
            ON_ERROR,
            fields(on_error=ON_ERROR, on_success=with_({"while": "{{ response.more }}"})),
        ),
        "sink": some(
            {"tool": "postgres", "table": "t"},
            {"tool": "postgres", "command": "insert", "args": [1]},
            {"tool": "duckdb", "table": "t", "mode": "upsert", "key": ["a"]},
            {"tool": "http", "url": "http://x", "timeout": "5s"},
            None,
        ),
        "output": some({"select": ["a"], "store": {"kind": "db", "ttl": "7d"}}, {}, None),
        "set": some(*SETS),
        "next": some(
            {"arcs": [{"step": "a", "when": "no", "set": {"ctx.a": 1}}, {"step": "a"}]},
            {"spec": {"mode": "inclusive"}, "arcs": [{"step": "a", "on": "call.partial"}]},
            {"arcs": None},
            None,
        ),
    },
)
DOCUMENTS = st.fixed_dictionaries(
    {
        "apiVersion": st.sampled_from(["noetl.io/v2", "noetl.io/v10"]),
        "kind": st.just("Playbook"),
        "metadata": with_({"name": "p"}, labels=some({"a": 1}), tags=some(["a", 2])),
        "workflow": st.lists(STEPS, min_size=1, max_size=2),
    },
    optional={
        "workload": some({"a": 1}, None),
        "keychain": some([{"name": "api", "kind": "bearer"}], [], None),
        "executor": some({"spec": {"timeout": "1h", "no_next_is_error": "no"}}, {}, None),
        "workbook": some([{"name": "w", "tool": {"kind": "noop"}}], [], None),
    },
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.filter_too_much])
@given(DOCUMENTS)
def test_what_the_parser_accepts_is_valid(playbook: dict[str, Any]) -> None:
    assume(not is_classic(read_tree(json.dumps(playbook), file="")[0]))
    problems = errors_of(playbook)

    assert not problems or not is_accepted(playbook), problems


def test_documents_that_are_tried_are_often_accepted() -> None:
    """Else the test above would say nothing."""
    accepted = 0

    @settings(max_examples=200, database=None, derandomize=True)
    @given(DOCUMENTS)
    def count(playbook: dict[str, Any]) -> None:
        nonlocal accepted
        accepted += is_accepted(playbook)

    count()
    assert accepted > 20, accepted


def test_the_schema_is_plain_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SCHEMA)) == SCHEMA
