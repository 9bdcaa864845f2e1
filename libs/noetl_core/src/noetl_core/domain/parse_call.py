"""What surrounds the call of a step, from its nodes to the model: `retry`, `sink`, `output`."""

from typing import Any

from noetl_core.domain.playbook import (
    PAGES_DEFAULT,
    RETRY_ATTEMPTS_DEFAULT,
    Circuit,
    OnError,
    OnSuccess,
    Output,
    Retry,
    Sink,
    Store,
)
from noetl_core.domain.reader import Fields, guard_text
from noetl_core.domain.yaml_tree import Mapping, Scalar, data_of

ATTEMPTS_MAX = 1000
PAGES_MAX = 100_000
CIRCUIT_FAILURES_MAX = 100

_ON_ERROR = ("when", "max_attempts", "backoff", "initial_delay", "max_delay", "jitter", "circuit")
_ON_SUCCESS = ("while", "max_attempts", "delay", "next_call", "collect", "merge_path")
_SINK = ("tool", "auth", "table", "mode", "key", "args")
SINK_TOOL_FIELDS = {
    "postgres": ("command", "query", "params"),
    "duckdb": ("database", "command"),
    "s3": ("bucket", "object", "format", "endpoint"),
    "http": ("url", "endpoint", "method", "headers", "params", "timeout"),
    "python": ("code", "libs", "timeout"),
}
"""Fields of a sink beside those that every sink has, by its tool."""


def read_retry(step: Fields) -> Retry:
    """`{on_error, on_success}`; `3`, `true` and the flat form mean `on_error`."""
    node = step.get("retry")
    if node is None:
        return Retry()
    if isinstance(node, Scalar):
        return _short_retry(step, node)
    known = ("on_error", "on_success")
    if isinstance(node, Mapping) and not node.items.keys() & {*known}:
        return Retry(on_error=_on_error(step.section("retry", known=_ON_ERROR)))
    fields = step.section("retry", known=known)
    on_error = on_success = None
    if fields.get("on_error") is not None:
        on_error = _on_error(fields.section("on_error", known=_ON_ERROR))
    if fields.get("on_success") is not None:
        on_success = _on_success(fields.section("on_success", known=_ON_SUCCESS))
    return Retry(on_error=on_error, on_success=on_success)


def _short_retry(step: Fields, node: Scalar) -> Retry:
    if isinstance(node.value, bool):
        return Retry(on_error=OnError()) if node.value else Retry()
    if isinstance(node.value, int) and 1 <= node.value <= ATTEMPTS_MAX:
        return Retry(on_error=OnError(max_attempts=node.value))
    step.wrong("retry", f"true, a number from 1 to {ATTEMPTS_MAX}, or a mapping")
    return Retry()


def _on_error(fields: Fields) -> OnError:
    return OnError(
        when=guard_text(fields, "when"),
        max_attempts=fields.whole(
            "max_attempts", RETRY_ATTEMPTS_DEFAULT, at_least=1, at_most=ATTEMPTS_MAX
        ),
        backoff=fields.choice("backoff", "exponential", OnError),
        initial_delay=fields.seconds("initial_delay", 1.0) or 0.0,
        max_delay=fields.seconds("max_delay", 60.0) or 0.0,
        jitter=fields.flag("jitter", default=False),
        circuit=_circuit(fields),
    )


def _circuit(on_error: Fields) -> Circuit | None:
    if on_error.get("circuit") is None:
        return None
    fields = on_error.section("circuit", known=("failures", "window", "open"))
    return Circuit(
        failures=fields.whole("failures", 10, at_least=1, at_most=CIRCUIT_FAILURES_MAX),
        window_s=fields.seconds("window", 60.0) or 0.0,
        open_s=fields.seconds("open", 30.0) or 0.0,
    )


def _on_success(fields: Fields) -> OnSuccess:
    condition = guard_text(fields, "while")
    if condition is None:
        fields.missing("while")
    return OnSuccess(
        condition=condition or "false",
        max_attempts=fields.whole("max_attempts", PAGES_DEFAULT, at_least=1, at_most=PAGES_MAX),
        delay=fields.seconds("delay", 0.0) or 0.0,
        next_call=fields.data("next_call"),
        collect=fields.choice("collect", "append", OnSuccess),
        merge_path=fields.text("merge_path"),
    )


def read_sink(step: Fields) -> Sink | None:
    node = step.get("sink")
    if node is None:
        return None
    tool = node.items.get("tool") if isinstance(node, Mapping) else None
    kind = tool.text if isinstance(tool, Scalar) else ""
    own = SINK_TOOL_FIELDS.get(kind, ())
    fields = step.section("sink", known=(*_SINK, *own))
    fields.required_text("tool")
    args = fields.get("args")
    sink = Sink(
        tool=fields.choice("tool", "postgres", Sink),
        auth=_data(fields, "auth"),
        table=fields.text("table"),
        mode=fields.choice("mode", "append", Sink),
        key=tuple(str(data_of(each)) for each in fields.items("key")),
        args=None if args is None else data_of(args),
        config={name: _data(fields, name) for name in own if fields.get(name) is not None},
    )
    _check_sink(fields, sink)
    return sink


def _check_sink(fields: Fields, sink: Sink) -> None:
    has_statement = "command" in sink.config or "query" in sink.config
    if sink.tool in {"postgres", "duckdb"} and not sink.table and not has_statement:
        fields.missing("table")
    if sink.mode == "upsert" and not sink.key:
        fields.missing("key")
    needed = {"http": ("url", "endpoint"), "python": ("code",), "s3": ("bucket",)}
    spellings = needed.get(sink.tool, ())
    if spellings and not any(name in sink.config for name in spellings):
        fields.missing("` or `".join(spellings))


def _data(fields: Fields, name: str) -> Any:
    node = fields.get(name)
    return None if node is None else data_of(node)


def read_output(step: Fields) -> Output:
    fields = step.section("output", known=("select", "store"))
    store = fields.section("store", known=("kind", "ttl"))
    return Output(
        select=tuple(str(data_of(each)) for each in fields.items("select")),
        store=Store(kind=store.choice("kind", "auto", Store), ttl_s=store.seconds("ttl")),
    )
