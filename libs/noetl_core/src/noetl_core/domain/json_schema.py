"""The JSON Schema of playbooks (draft 2020-12), for editors: schema/playbook.schema.json.

It says what can be said of a document field by field, in the current dialect. What only the whole
of it shows (arcs that lead nowhere, templates that cannot be evaluated, names given twice) is the
validator's. Everything that the validator accepts is valid here too, but for an empty list in the
place of a mapping. tests/domain/test_json_schema.py asks the parser for the keys of every section,
so that the two cannot part silently.
"""

from typing import Any

from noetl_core.domain.json_schema_tools import sink_schema, task_schemas
from noetl_core.domain.json_schema_words import (
    Schema,
    anything,
    assignments,
    choice,
    data,
    flag,
    given,
    guard,
    is_constant,
    listing,
    must_have,
    name,
    refer,
    seconds,
    section,
    text,
    whole,
)
from noetl_core.domain.parse import API_VERSIONS
from noetl_core.domain.parse_call import ATTEMPTS_MAX, CIRCUIT_FAILURES_MAX, PAGES_MAX
from noetl_core.domain.parse_step import (
    CHUNK_SIZE_MAX,
    FRAME_ROWS_MAX,
    MAX_IN_FLIGHT_MAX,
    PRIORITY_MAX,
    RESERVED_NAMES,
    SHARD_RETRIES_MAX,
    STEP_NAME_LENGTH_MAX,
)
from noetl_core.domain.parse_tool import ATTEMPTS_MAX as TASK_ATTEMPTS_MAX
from noetl_core.domain.parse_tool import TASKS_MAX
from noetl_core.domain.playbook import (
    PAGES_DEFAULT,
    PATH_LENGTH_MAX,
    PLACEMENT_WAIT_DEFAULT,
    POOL_DEFAULT,
    RETRY_ATTEMPTS_DEFAULT,
    SHARD_RETRIES_DEFAULT,
    Action,
    Arc,
    Cursor,
    ExecutorSpec,
    FailurePolicy,
    Frame,
    LoopSpec,
    NextSpec,
    OnError,
    OnSuccess,
    StepSpec,
    Store,
)
from noetl_core.domain.tools import PARKED_KINDS
from noetl_core.domain.workers import LABEL_NAME, LABEL_VALUE, POOL_NAME

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def playbook_schema() -> Schema:
    """Of the current dialect; a classic document is read, but not described here."""
    fields: dict[str, Schema] = {
        "apiVersion": {"description": "The dialect of this document.", "enum": [*API_VERSIONS]},
        "kind": {"description": "Always Playbook.", "const": "Playbook"},
        "metadata": _metadata(),
        "executor": _executor(),
        "keychain": listing("The credentials that this playbook needs.", _keychain_entry()),
        "workload": data(
            "Defaults that templates read as `workload.NAME`. The payload of a request is merged "
            "deeply over them."
        ),
        "workbook": listing(
            "Tasks to use in several steps, as `tool: {kind: workbook, name: ...}`.",
            _workbook_entry(),
        ),
        "workflow": {
            "description": "The steps. The first one is where it begins, unless "
            "`executor.spec.entry_step` names another.",
            "type": "array",
            "minItems": 1,
            "items": refer("step"),
        },
    }
    return {
        "$schema": DIALECT,
        "title": "NoETL playbook",
        **must_have(
            section("A playbook: steps, the tools they call and the arcs between them.", fields),
            *("apiVersion", "kind", "metadata", "workflow"),
        ),
        "$defs": {
            "step": _step(),
            "arc": _arc(),
            "rule": _rule(),
            "action": _action(),
            "on_error": _on_error(),
            "on_success": _on_success(),
            "sink": sink_schema(),
            **task_schemas(),
        },
    }


def _metadata() -> Schema:
    fields = {
        "name": name("What the playbook is called."),
        "path": text("Where the catalog keeps it. By default its name.", maxLength=PATH_LENGTH_MAX),
        "description": text("What it does, for people."),
        "labels": data("Texts by name, for people and searches."),
        "tags": listing("Words, for people and searches."),
    }
    return must_have(section("Who the playbook is.", fields), "name")


def _executor() -> Schema:
    defaults = {"timeout_s": seconds("How long a task may take that says nothing of its own.")}
    policy = {"defaults": section("What holds for everything without its own.", defaults)}
    spec = {
        "entry_step": text("Where it begins. By default the first step."),
        "final_step": text("A step that runs once, when nothing else is left to do."),
        "no_next_is_error": flag("Whether a step without `next` is a failure.", default=False),
        "loop_mode": choice("How loops run that name no mode.", ExecutorSpec, "loop_mode"),
        "timeout": seconds("How long the whole execution may take."),
        "policy": section("Policies of the execution.", policy),
    }
    inner = {"spec": section("How it is executed.", spec)}
    return section("How the playbook as a whole is executed.", inner)


def _keychain_entry() -> Schema:
    fields = {
        "name": name("Templates read it as `keychain.NAME.FIELD`."),
        "kind": text("What kind of credential it is.", examples=["bearer", "postgres"]),
    }
    return must_have(section("A credential.", fields), "name")


def _workbook_entry() -> Schema:
    tool = {**_tool(), "description": "The one task."}
    fields = {
        "name": name("What steps call it."),
        "desc": anything("What it does, for people."),
        "tool": {**tool, "anyOf": [refer("task"), {**_tasks(), "maxItems": 1}]},
    }
    return must_have(section("A task to use in several steps.", fields), "name", "tool")


def _step() -> Schema:
    fields = {
        "step": name(
            "The name of the step. Templates read its result by it.",
            maxLength=STEP_NAME_LENGTH_MAX,
            **{"not": {"enum": sorted(RESERVED_NAMES)}},
        ),
        "desc": text("What it does, for people."),
        "spec": _step_spec(),
        "input": data("Values for the tool: `input.NAME` in its templates, arguments of code."),
        "loop": _loop(),
        "tool": _tool(),
        "retry": _retry(),
        "sink": _or_null("sink"),
        "output": _output(),
        "set": assignments("What the step writes to ctx when it has ended well.", "ctx"),
        "next": _next(),
    }
    has_sink = {"if": given("sink"), "then": {"properties": {"tool": _is_not_parked()}}}
    schema = section("A step: it is entered, calls its tool, and is left by its arcs.", fields)
    return {**must_have(schema, "step"), **has_sink}


def _step_spec() -> Schema:
    fanout = {
        "max_shard_retries": whole(
            "How often a failed item is tried again by itself.",
            at_least=0,
            at_most=SHARD_RETRIES_MAX,
            default=SHARD_RETRIES_DEFAULT,
        ),
        "fail_fast": flag("Whether the first failed item ends the loop.", default=False),
        "allow_partial": flag("Whether a loop may end well with failed items.", default=True),
    }
    fields = {
        "timeout": seconds("How long the whole step may take, retries and waiting included."),
        "pool": text(
            "Which workers run it.", pattern=f"^{POOL_NAME.pattern}$", default=POOL_DEFAULT
        ),
        "join": choice(
            "`all`: runs once, when no other branch can still come here. `any`: runs for each "
            "branch that comes.",
            StepSpec,
            "join",
        ),
        "priority": whole(
            "Commands with a higher one are taken first.",
            at_least=-PRIORITY_MAX,
            at_most=PRIORITY_MAX,
            default=0,
        ),
        "policy": _step_policy(),
        "loop_mode": choice("The mode of the step's loop.", ExecutorSpec, "loop_mode"),
        "fanout": section("How a loop of mode `fanout` treats failures.", fanout),
        "placement": _placement(),
    }
    return section("How the step is run.", fields)


def _placement() -> Schema:
    fields = {
        "labels": {
            **data("What a worker must have: it never gets a command whose labels it lacks."),
            "propertyNames": {"pattern": f"^{LABEL_NAME.pattern}$"},
            "additionalProperties": {
                "type": ["string", "number", "boolean"],
                "pattern": f"^{LABEL_VALUE.pattern}$",
            },
        },
        "worker": text("The worker that is meant, by its name; a template may give it."),
        "affinity": text(
            "A key, usually a template: equal keys go to the same worker. `previous` is the worker "
            "whose result led here."
        ),
        "wait": seconds(
            "How long only that worker may take a command; then any worker of the pool may.",
            default=PLACEMENT_WAIT_DEFAULT,
        ),
    }
    both = {"allOf": [given("worker"), given("affinity")]}
    return section("Which workers of the pool run it.", fields, **{"not": both})


def _step_policy() -> Schema:
    failure = {
        "mode": choice(
            "`fail_fast`: the first failed item of a loop ends it. `best_effort`: all are tried.",
            FailurePolicy,
            "mode",
        )
    }
    admit = {"rules": listing("The first rule that holds decides.", _admit_rule())}
    fields = {
        "failure": section("What a failed item means for the loop.", failure),
        "rules": listing(
            "What happens after each task that has no rules of its own; the first that holds.",
            refer("rule"),
        ),
        "admit": section("Whether the step runs at all when it is entered.", admit),
    }
    return section("What the step does about failures, and when it may run.", fields)


def _admit_rule() -> Schema:
    allow = {"allow": flag("Whether the step runs.", default=True)}
    inner = {**allow, "then": section("What the rule says.", allow)}
    verdict = {**section("What the rule says.", inner), "type": "object"}
    fields = {"when": guard("The rule holds where this does."), "then": verdict, "else": verdict}
    schema = section("`{when, then: {allow}}`, or `{else: {allow}}`.", fields)
    return {**schema, "type": "object", "anyOf": [given("then"), given("else")]}


def _loop() -> Schema:
    fields = {
        "in": {
            "description": "The items: a list, or a template that gives one.",
            "anyOf": [
                {"type": ["array", "null"]},
                {"type": "string", "pattern": r"\{\{|\{%"},
            ],
        },
        "iterator": text(
            "What templates call the item: `iter.NAME`, or NAME alone.",
            pattern=r"^[A-Za-z_]\w*$",
            default="item",
            **{"not": {"enum": sorted(RESERVED_NAMES)}},
        ),
        "spec": _loop_spec(),
        "cursor": _cursor(),
    }
    modes = {"properties": {"spec": {"properties": {"mode": {"enum": ["cursor", None]}}}}}
    other = {"properties": {"spec": {"properties": {"mode": {"not": {"const": "cursor"}}}}}}
    return section(
        "Runs the tool for each item, every one a command of its own.",
        fields,
        **{
            "anyOf": [{"type": "null"}, given("in"), given("cursor")],
            "if": given("cursor"),
            "then": modes,
            "else": other,
        },
    )


def _loop_spec() -> Schema:
    fields = {
        "mode": choice(
            "`sequential`: one after the other. `parallel`: up to max_in_flight at once. `fanout`: "
            "many, in any order. `cursor`: rows that are claimed.",
            LoopSpec,
            "mode",
        ),
        "max_in_flight": whole(
            "How many items are under way at once.", at_least=1, at_most=MAX_IN_FLIGHT_MAX
        ),
        "chunk_size": whole(
            "Hands so many items to one command, as a list.", at_least=1, at_most=CHUNK_SIZE_MAX
        ),
        "frame": section("How a cursor loop works on what it claims.", _frame()),
    }
    del fields["mode"]["default"]  # it comes from the executor
    return section("How the loop runs.", fields)


def _frame() -> dict[str, Schema]:
    rows: dict[str, Any] = {"at_least": 1, "at_most": FRAME_ROWS_MAX}
    return {
        "max_rows": whole("Rows that one claim takes.", default=Frame().max_rows, **rows),
        "process": choice("Runs the tool for each row, or for all at once.", Frame, "process"),
        "row_concurrency": whole("Rows that are worked on at once.", default=1, **rows),
        "lease_seconds": seconds("How long a claim holds.", Frame().lease_seconds),
    }


def _cursor() -> Schema:
    fields = {
        "kind": choice("Where the rows are.", Cursor, "kind"),
        "auth": anything("The credential to claim them with.", "pg"),
        "claim": name(
            "A statement that takes rows and returns them; `{{ __frame_max_rows }}` says how many."
        ),
    }
    return section("Claims work instead of listing it.", fields, required=["claim"])


def _tasks() -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": TASKS_MAX, "items": refer("task")}


def _tool() -> Schema:
    """One task, or a pipeline, in which nothing waits without a worker."""
    pipeline = {"if": {"type": "array", "minItems": 2}, "then": _is_not_parked()}
    return {
        "description": "What the step calls: one task, or a list of them that one worker runs.",
        "anyOf": [refer("task"), _tasks(), {"type": "null"}],
        **pipeline,
    }


def _is_not_parked() -> Schema:
    """Whatever its shape: `{kind: x}`, `{label: {kind: x}}`, or a list of these."""
    parked = is_constant("kind", *sorted(PARKED_KINDS))
    inner = {"maxProperties": 1, "additionalProperties": parked, "minProperties": 1}
    labelled = {"not": given("kind"), **inner, "type": "object"}
    waits = {"anyOf": [{"type": "object", **parked}, labelled]}
    return {"not": {"anyOf": [waits, {"type": "array", "contains": waits}]}}


def _rule() -> Schema:
    otherwise = {
        "if": {"required": ["then"]},
        "then": section("What it does.", {"then": _or_null("action")}),
        "else": refer("action"),
        "type": "object",
    }
    fields = {
        "when": guard("The rule holds where this does; `output` is what the task gave."),
        "then": refer("action"),
        "else": {"description": "What happens where no rule before holds.", **otherwise},
    }
    schema = section("`{when, then}`, or `{else}`. The first rule that holds is taken.", fields)
    alone = {"not": {"anyOf": [given("when"), given("then")]}}
    return {
        **schema,
        "type": "object",
        "anyOf": [given("then"), given("else")],
        "if": given("else"),
        "then": alone,
    }


def _action() -> Schema:
    fields = {
        "do": choice(
            "`continue`: the next task. `retry`: this one again. `jump`: to another. `break`: the "
            "step has ended well. `fail`: it has failed.",
            Action,
            "do",
        ),
        "attempts": whole(
            "How often the task is tried in all.",
            at_least=1,
            at_most=TASK_ATTEMPTS_MAX,
            default=RETRY_ATTEMPTS_DEFAULT,
        ),
        "delay": seconds("The pause before the next attempt."),
        "backoff": choice("How the pause grows.", Action, "backoff"),
        "to": text("The label of a task, or `previous`."),
        "set": assignments("What is written before it goes on.", "ctx", "iter"),
    }
    schema = section("What happens after a task.", fields)
    jump = {"if": is_constant("do", "jump"), "then": _has_target()}
    return {**schema, "type": "object", **jump}


def _has_target() -> Schema:
    return {"required": ["to"], "properties": {"to": {"type": "string", "minLength": 1}}}


def _retry() -> Schema:
    both = {
        "on_error": _or_null("on_error"),
        "on_success": _or_null("on_success"),
    }
    return {
        "description": "When the call is made again, each time as a command of its own. A number "
        "is how often it is tried after an error.",
        "anyOf": [
            {"type": ["boolean", "null"]},
            {"type": "integer", "minimum": 1, "maximum": ATTEMPTS_MAX},
            refer("on_error"),
            {**section("After an error, and for further pages.", both), "type": "object"},
        ],
    }


def _on_error() -> Schema:
    circuit = {
        "failures": whole(
            "Failures within the window that open it.",
            at_least=1,
            at_most=CIRCUIT_FAILURES_MAX,
            default=10,
        ),
        "window": seconds("How long a failure counts.", 60.0),
        "open": seconds("How long nothing is tried then.", 30.0),
    }
    fields = {
        "when": guard("Only errors for which this holds; `error.kind`, `error.retryable`."),
        "max_attempts": whole(
            "How often it is tried in all.",
            at_least=1,
            at_most=ATTEMPTS_MAX,
            default=RETRY_ATTEMPTS_DEFAULT,
        ),
        "backoff": choice("How the pause grows.", OnError, "backoff"),
        "initial_delay": seconds("The pause before the second attempt.", 1.0),
        "max_delay": seconds("The longest pause.", 60.0),
        "jitter": flag("Whether pauses vary, so that many do not come at once.", default=False),
        "circuit": section("Stops hammering a target that is down.", circuit),
    }
    return {**section("Tries a call again that failed.", fields), "type": "object"}


def _on_success() -> Schema:
    condition = guard("Another call follows while this holds; `response` is the answer.")
    condition["anyOf"][1] = {"enum": [True, False, 0, 1]}
    fields = {
        "while": condition,
        "max_attempts": whole(
            "How many calls are made at most.",
            at_least=1,
            at_most=PAGES_MAX,
            default=PAGES_DEFAULT,
        ),
        "delay": seconds("The pause between two calls."),
        "next_call": data("What goes over the fields of the tool for the next call."),
        "collect": choice("What becomes of the answers.", OnSuccess, "collect"),
        "merge_path": text("Where in an answer the part is that is collected, such as `data`."),
    }
    return must_have(
        section("Makes the call again for the next page, or to poll.", fields), "while"
    )


def _output() -> Schema:
    store = {
        "kind": choice("Where the result is kept.", Store, "kind"),
        "ttl": seconds("After how long it may go."),
    }
    fields = {
        "select": listing("Paths of the result that are kept; the rest is dropped."),
        "store": section("Where the result is kept, and for how long.", store),
    }
    return section("What is kept of the result.", fields)


def _next() -> Schema:
    spec = {
        "mode": choice(
            "`exclusive`: the first arc that holds. `inclusive`: every one, a branch each.",
            NextSpec,
            "mode",
        ),
        "on_no_match": choice("What it means that no arc holds.", NextSpec, "on_no_match"),
    }
    fields = {
        "spec": section("How the arcs are chosen.", spec),
        "arcs": listing("Where it goes from here, in order.", refer("arc")),
    }
    return section("Where it goes from here. Without it the branch ends.", fields)


def _arc() -> Schema:
    fields = {
        "step": name("The step that is entered."),
        "when": guard(
            "Taken where this holds. `{{ event.name == 'step.failed' }}` takes a failure."
        ),
        "set": assignments("What is written to ctx when it is taken.", "ctx"),
        "on": choice("`call.partial`: taken once for every chunk of the result.", Arc, "on"),
        "input": data("Goes over the input of the step that is entered."),
    }
    return must_have(section("A way to another step.", fields), "step")


def _or_null(definition: str) -> Schema:
    return {"anyOf": [refer(definition), {"type": "null"}]}
