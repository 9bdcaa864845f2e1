"""What a bare name means, and what is never loaded."""

from typing import Any

import pytest

from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.ids import RefId
from noetl_core.domain.scope import Scope, StepViews, iterator_names, workload_of

STORED = Envelope(status="ok", reference=Reference(ref_id=RefId(7), type="db"))


def not_loaded(envelope: Envelope) -> Any:
    assert envelope.reference is not None
    raise ReferenceNeeded(envelope.reference)


def test_bare_names_are_found_in_the_order_of_the_language() -> None:
    order = ("input", "iterator", "local", "steps", "ctx", "workload")
    # Layer n has the names n and above, so each name is first found in the layer of its number.
    scope = Scope(
        **{where: {f"n{k}": where for k in range(n, 6)} for n, where in enumerate(order[::-1])}
    )

    assert [scope[f"n{n}"] for n in range(6)] == list(order[::-1])
    assert scope["workload"]["n5"] == "workload"
    assert "n6" not in scope


def test_a_root_is_never_hidden_by_a_users_name() -> None:
    scope = Scope(ctx={"output": 1}, input={"ctx": 2}, roots={"output": "root"})

    assert scope["output"] == "root"
    assert scope["ctx"] == {"output": 1}
    assert scope["input"] == {"ctx": 2}


def test_the_place_in_a_loop_is_no_bare_name() -> None:
    scope = Scope(iterator=iterator_names("row", "x", index=0, total=1), ctx={"index": 9})

    assert scope["row"] == "x"
    assert scope["iter"]["last"] is True
    assert scope["index"] == 9


def test_a_payload_is_asked_for_only_when_it_is_read() -> None:
    scope = Scope(
        ctx={"a": 1},
        steps=StepViews({"load": STORED}, not_loaded),
        workload=workload_of({"b": 1}, STORED, not_loaded),
    )

    assert scope["a"] == 1
    assert scope["load"]["status"] == "ok"
    with pytest.raises(ReferenceNeeded):
        scope["load"]["rows"]
    with pytest.raises(ReferenceNeeded):
        scope["b"]


def test_the_payload_lies_over_the_workload() -> None:
    given = workload_of({"a": {"x": 1, "y": 2}}, STORED, lambda _: {"a": {"y": 3}})

    assert Scope(workload=given)["a"] == {"x": 1, "y": 3}
