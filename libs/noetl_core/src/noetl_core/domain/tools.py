"""Which tools there are and what each is told. The one place to add a kind to the language."""

import re
from typing import NamedTuple


class ToolFields(NamedTuple):
    """The fields of one kind, beside those that every task has."""

    fields: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    """Spellings of the one thing the tool cannot do without: exactly one of them is given."""
    raw: tuple[str, ...] = ()
    """Fields that are handed over as they stand. Braces in code are code, not templates."""


TASK_FIELDS = ("name", "kind", "desc", "input", "set", "spec", "timeout")
"""Fields that every task has."""

_PYTHON_CODE = ("code", "script")
_SQL = ("command", "query", "script")
_DUCKDB = ("command", "commands", "query")
_SHELL = ("command", "cmds")
_URL = ("url", "endpoint")
_WAIT = ("seconds", "until", "signal")

PARKED_KINDS = frozenset({"playbook", "wait", "approval"})
"""Tools that wait without a worker: the command is parked until something happens elsewhere."""

TOOLS: dict[str, ToolFields] = {
    "noop": ToolFields(fields=("value",)),
    "python": ToolFields(fields=(*_PYTHON_CODE, "libs"), one_of=_PYTHON_CODE, raw=_PYTHON_CODE),
    "http": ToolFields(
        fields=(
            "method",
            *_URL,
            "headers",
            "params",
            "json",
            "payload",
            "body",
            "data",
            "form",
            "auth",
            "verify_ssl",
            "follow_redirects",
        ),
        one_of=_URL,
    ),
    "shell": ToolFields(fields=(*_SHELL, "env", "cwd"), one_of=_SHELL),
    "duckdb": ToolFields(fields=("database", *_DUCKDB, "params", "auth", "tables"), one_of=_DUCKDB),
    "fail": ToolFields(fields=("message", "code", "error_kind", "retryable")),
    "postgres": ToolFields(fields=("auth", *_SQL, "params", "pool", "chunk_size"), one_of=_SQL),
    "playbook": ToolFields(fields=("path", "version", "return_step"), one_of=("path",)),
    "workbook": ToolFields(),
    "wait": ToolFields(fields=_WAIT, one_of=_WAIT),
    "approval": ToolFields(fields=("message", "approvers", "form")),
}

KINDS_TO_COME = frozenset(
    {
        "artifact",
        "container",
        "nats",
        "resolve",
        "s3",
        "transfer",
    }
)
"""Kinds of the language that this version cannot run yet."""


PLUGIN_KIND = re.compile(r"[A-Za-z][\w-]*(\.[\w-]+)+")


def is_plugin_kind(kind: str) -> bool:
    """`acme.mailer`: a tool of another package. Which fields it takes, only the worker knows."""
    return PLUGIN_KIND.fullmatch(kind) is not None


def is_raw(kind: str, field: str) -> bool:
    """Whether the field is never rendered."""
    return kind in TOOLS and field in TOOLS[kind].raw
