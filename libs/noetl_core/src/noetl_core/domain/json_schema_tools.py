"""The part of the schema that is about tools: tasks by kind, and the sink."""

from typing import Any

from noetl_core.domain.analysis import ROOTS
from noetl_core.domain.json_schema_words import (
    Schema,
    anything,
    assignments,
    choice,
    data,
    given,
    is_constant,
    listing,
    must_have,
    refer,
    seconds,
    section,
    text,
)
from noetl_core.domain.parse_call import SINK_TOOL_FIELDS
from noetl_core.domain.playbook import Sink
from noetl_core.domain.tools import PLUGIN_KIND, TASK_FIELDS, TOOLS, ToolFields

_TASK: dict[str, Schema] = {
    "name": {
        "description": "The label of the task: rules jump to it, templates read its result by it. "
        "Of kind `workbook`, the name of the task to run.",
        "type": ["string", "number", "boolean", "null"],
        "not": {"enum": sorted(ROOTS)},
    },
    "desc": anything("What it does, for people."),
    "input": data("Values for this task, over those of the step."),
    "set": assignments("What the task writes when it has ended well.", "ctx", "iter"),
    "spec": section(
        "How the task is run.",
        {
            "policy": section(
                "What happens after it.",
                {"rules": listing("The first rule that holds is taken.", refer("rule"))},
            ),
            "timeout": seconds("How long the task may take."),
        },
    ),
    "timeout": seconds("How long the task may take."),
}

_KINDS = {
    "noop": "Does nothing. Its result is `value`, or its input.",
    "python": "Runs Python code.",
    "http": "Makes an HTTP request.",
    "shell": "Runs commands of a shell.",
    "duckdb": "Runs SQL in DuckDB.",
    "fail": "Fails, as it is told to.",
    "postgres": "Runs SQL in Postgres.",
    "playbook": "Runs another playbook and waits for its end, without a worker.",
    "workbook": "Runs the task of the workbook that `name` names.",
    "wait": "Waits, without a worker.",
    "approval": "Waits until somebody approves, without a worker.",
}

_AUTH = anything("The name of the credential to use.", "pg", "api")

_FIELDS: dict[str, Schema] = {
    "value": anything("What the result is. Without it, the input."),
    "code": anything("Code that sets `result`, returns, or defines main(...). Not a template."),
    "script": anything("The same as `code`, or statements for a database."),
    "libs": anything("Modules that the code needs.", ["math", "json"]),
    "method": anything("The method of the request.", *("GET", "POST", "PUT", "PATCH", "DELETE")),
    "url": anything("Where the request goes.", "{{ workload.api }}/users"),
    "endpoint": anything("The same as `url`."),
    "headers": anything("Headers of the request."),
    "params": anything("Parameters of the request, or of the statement."),
    "json": anything("A body that is sent as JSON."),
    "payload": anything("The same as `json`."),
    "body": anything("The body as it is."),
    "data": anything("The body: a mapping is sent as a form, anything else as it is."),
    "form": anything("Fields of a form."),
    "auth": _AUTH,
    "verify_ssl": anything("Whether the certificate of the server is checked.", True, False),
    "follow_redirects": anything("Whether redirects are followed.", True, False),
    "command": anything("The statement, or the command."),
    "commands": anything("Statements, one after the other."),
    "cmds": anything("Commands, one after the other."),
    "query": anything("The statement."),
    "env": anything("Variables of the environment."),
    "cwd": anything("The directory to run in."),
    "database": anything("The file of the database. Without it, one in memory."),
    "tables": anything("Results to read as tables, by name.", {"orders": "{{ orders._ref }}"}),
    "message": anything("What people read."),
    "error_kind": anything("The `error.kind` that guards see."),
    "retryable": anything("Whether trying again may help.", True, False),
    "pool": anything("How many connections it may hold."),
    "chunk_size": anything("Streams the rows, so many at a time; see `on: call.partial`."),
    "path": anything("The playbook in the catalog.", "examples/hello"),
    "version": anything("Its version. Without it, the newest."),
    "return_step": anything("The step of the other playbook whose result is wanted."),
    "seconds": anything("How long to wait.", 60),
    "until": anything("The moment to wait for.", "2030-01-31T08:00:00Z"),
    "signal": anything("The name of the signal to wait for."),
    "approvers": anything("Who may approve. Without it, everybody who may send signals."),
    "bucket": anything("The bucket."),
    "object": anything("The name of the object."),
    "format": anything("How the rows are written.", "json", "csv", "parquet"),
    "timeout": seconds("How long it may take."),
}
_OWN: dict[tuple[str, str], Schema] = {
    ("fail", "code"): anything("The `error.code` that guards see."),
    ("approval", "form"): anything("What whoever approves is asked to fill in."),
}


def task_schemas() -> dict[str, Schema]:
    """`task` in its two shapes, and a definition for each kind of tool."""
    kinds = {f"tool_{kind}": _of_kind(kind, tool) for kind, tool in TOOLS.items()}
    labelled = {
        "minProperties": 1,
        "maxProperties": 1,
        "propertyNames": {"not": {"enum": sorted({*TASK_FIELDS, *ROOTS})}},
        "additionalProperties": refer("call"),
    }
    task = {
        "description": "A task: `{kind: ...}`, with a `name` if it has one, or `{NAME: {kind: "
        "...}}`.",
        "type": "object",
        "if": {"required": ["kind"]},
        "then": refer("call"),
        "else": labelled,
    }
    return {"task": task, "call": _call(), **kinds}


def _call() -> Schema:
    """Which definition holds is told by `kind`; what a tool of another package takes, it knows."""
    ours = {
        "enum": list(TOOLS),
        "markdownEnumDescriptions": [_KINDS[kind] for kind in TOOLS],
    }
    plugin = {"type": "string", "pattern": f"^{PLUGIN_KIND.pattern}$"}
    kind = {"description": "Which tool is called.", "anyOf": [ours, plugin]}
    return {
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": kind, **_TASK},
        "allOf": [
            {"if": is_constant("kind", kind), "then": refer(f"tool_{kind}")} for kind in TOOLS
        ],
    }


def _of_kind(kind: str, tool: ToolFields) -> Schema:
    """The fields that every task has are described in `call`; here they are only known."""
    fields: dict[str, Any] = {
        **dict.fromkeys(TASK_FIELDS, True),
        **{field: _field(kind, field) for field in tool.fields},
    }
    schema = {**section(_KINDS[kind], fields), "type": "object"}
    needed = ("name",) if kind == "workbook" else tool.one_of
    return {**schema, "oneOf": [given(field) for field in needed]} if needed else schema


def _field(kind: str, field: str) -> Schema:
    return _OWN.get((kind, field)) or _FIELDS[field]


_TABLES = ("postgres", "duckdb")
_SINK_NEEDS = {"http": ("url", "endpoint"), "python": ("code",), "s3": ("bucket",)}


def sink_schema() -> Schema:
    """Which further fields there are is told by `tool`."""
    fields: dict[str, Schema] = {
        "tool": {"description": "The tool that writes.", "enum": list(SINK_TOOL_FIELDS)},
        "auth": _AUTH,
        "table": text("The table that the rows go to."),
        "mode": choice("How they are written.", Sink, "mode"),
        "key": listing("The columns that tell a row from another, for `upsert`."),
        "args": anything("A row, or a list of rows. Without it, the result itself."),
    }
    own = sorted({field for names in SINK_TOOL_FIELDS.values() for field in names})
    every = fields | {field: _FIELDS[field] for field in own}
    upsert = {
        "if": is_constant("mode", "upsert"),
        "then": {"required": ["key"], "properties": {"key": {"type": "array", "minItems": 1}}},
    }
    by_tool = [_sink_of(tool, [*fields, *own]) for tool, own in SINK_TOOL_FIELDS.items()]
    schema = section("Where the result goes, in the same command.", every)
    return {**must_have(schema, "tool"), "allOf": [upsert, *by_tool]}


def _sink_of(tool: str, known: list[str]) -> Schema:
    needs: list[dict[str, Any]] = [given(field) for field in _SINK_NEEDS.get(tool, ())]
    if tool in _TABLES:
        table = {"required": ["table"], "properties": {"table": {"type": "string", "minLength": 1}}}
        needs = [table, *(given(field) for field in ("command", "query") if field in known)]
    rules: Schema = {"propertyNames": {"enum": known}, "anyOf": needs}
    return {"if": is_constant("tool", tool), "then": rules}
