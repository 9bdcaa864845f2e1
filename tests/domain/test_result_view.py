"""One step result answers the common spellings, loaded or not."""

from typing import Any

import pytest

from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ReferenceNeeded, TemplateError, ToolError
from noetl_core.domain.ids import RefId
from noetl_core.domain.result_view import EventName, StepDocument, plain, view_of
from noetl_core.domain.template import compile_template

OK = Envelope(status="ok", reference=Reference(ref_id=RefId(7), type="db"))
LOOP = Envelope(
    status="ok",
    reference=Reference(ref_id=RefId(9), type="eventlog"),
    context={"stats.total": 3, "stats.success": 2, "stats.failed": 1},
)
ROWS = {"rows": [{"id": 1}, {"id": 2}], "row_count": 2, "columns": ["id"]}
PAGE = {"status_code": 200, "headers": {"a": "b"}, "data": {"total": 3, "status": "open"}}


def read(expression: str, view: Any) -> Any:
    return compile_template("{{ " + expression + " }}").evaluate({"s": view})


@pytest.mark.parametrize(
    ("document", "expression", "value"),
    [
        (ROWS, "s.rows[1].id", 2),
        (ROWS, "s.data.rows[1].id", 2),
        (ROWS, "s.command_0.rows[1].id", 2),
        (ROWS, "s.row_count", 2),
        ({"rows": [1, 2, 3]}, "s.row_count", 3),
        (PAGE, "s.total", 3),
        (PAGE, "s.data.total", 3),
        (PAGE, "s.data.status", "open"),
        (PAGE, "s.body.total", 3),
        (PAGE, "s.data.status_code", 200),
        (PAGE, "s.data.data.total", 3),
        (PAGE, "s.http.status", 200),
        ({"data": [1, 2], "total": 2}, "s.data.total", 2),
        ({"data": [1, 2], "total": 2}, "s.data[1]", 2),
        ({"status": "error"}, "s.status == 'ok'", True),
        ({"status": "error"}, "s.status == 'success'", True),
        ({"status": "error"}, "s.data.status", "error"),
        ({"a": 1}, "s._ref.ref_id", "7"),
        ({"a": 1}, "s.error.kind", ""),
        ({"a": 1}, "s.pg.sqlstate", None),
        ([1, 2], "s[1]", 2),
        ([1, 2], "s.data[0]", 1),
        ([1, 2], "s.results | length", 2),
        (None, "s.status == 'ok'", True),
        (5, "s.data + 1", 6),
        ("text", "s.body", "text"),
    ],
)
def test_a_loaded_result_answers(document: Any, expression: str, value: Any) -> None:
    assert read(expression, view_of(OK, document)) == value


def test_a_pipeline_answers_for_its_tasks() -> None:
    view = view_of(
        OK,
        StepDocument(data={"a": 1}, task="save", earlier={"load": {"rows": [1]}}),
    )

    assert read("s.a", view) == 1
    assert read("s.results.load.rows", view) == [1]
    assert read("s.results.save.a", view) == 1


def test_an_unknown_field_is_undefined_and_not_empty() -> None:
    with pytest.raises(TemplateError):
        read("s.nothing.more", view_of(OK, {"a": 1}))


def test_a_loop_knows_its_counts_without_its_results() -> None:
    assert read("s.stats.failed", view_of(LOOP)) == 1
    with pytest.raises(ReferenceNeeded) as needed:
        read("s.results[0]", view_of(LOOP))
    assert needed.value.reference == LOOP.reference


def test_a_pushed_value_is_used_and_anything_else_is_asked_for() -> None:
    envelope = Envelope(status="ok", reference=OK.reference, context={"data.total": 3})
    view = view_of(envelope, paths={"data.total", "data.rows"})

    assert read("s.data.total > 2 and s.status == 'ok'", view)
    with pytest.raises(ReferenceNeeded) as needed:
        read("s.data.rows", view)
    assert needed.value.reference == OK.reference


def test_a_payload_that_was_pushed_as_a_whole_answers_everything() -> None:
    envelope = Envelope(status="ok", reference=OK.reference, context={"": {"a": {"b": 1}}})

    assert read("s.a.b + s.data.a.b", view_of(envelope, paths={""})) == 2


def test_half_of_a_value_never_stands_for_the_whole() -> None:
    envelope = Envelope(status="ok", reference=OK.reference, context={"data.total": 3})

    with pytest.raises(ReferenceNeeded):
        read("s.data", view_of(envelope, paths={"data.total", "data"}))
    with pytest.raises(ReferenceNeeded):
        plain(read("s.data", view_of(envelope, paths={"data.total"})))
    with pytest.raises(ReferenceNeeded):
        read("s.data and 1", view_of(envelope, paths={"data.total"}))


def test_a_failure_shows_its_error_and_protocol() -> None:
    error = ToolError(
        kind="rate_limit", message="slow down", retryable=True, details={"http": {"status": 429}}
    )
    view = view_of(Envelope(status="error"), error=error)

    assert read("s.status == 'error' and s.http.status in [429, 503]", view)
    assert read("s.error.retryable and s.error.http.status == 429", view)


def test_what_leaves_a_template_is_plain() -> None:
    view = view_of(OK, {"data": {"a": 1}, "b": [1]})
    left = plain({"whole": view, "inner": read("s.data", view), "status": read("s.status", view)})

    assert left == {"whole": {"data": {"a": 1}, "b": [1]}, "inner": {"a": 1}, "status": "ok"}
    assert {type(left["whole"]), type(left["inner"])} == {dict}
    assert type(left["status"]) is str
    assert plain(view_of(OK, None)) is None


@pytest.mark.parametrize(
    ("name", "alias"),
    [("step.failed", "call.error"), ("call.done", "step.exit"), ("loop.done", "step.exit")],
)
def test_an_event_equals_its_other_names(name: str, alias: str) -> None:
    assert EventName(name) == alias
    assert alias == EventName(name)
    assert EventName(name) != "execution.failed"
    assert EventName("step.exit") != "loop.done"
