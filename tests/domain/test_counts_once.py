"""What counts once although it could count twice: signals, and the slots of a cursor."""

import pytest

from noetl_core.domain.errors import PlaybookInvalidError
from noetl_core.domain.events import CallFailed
from noetl_core.domain.parse import parse_playbook
from noetl_core.domain.playbook import Cursor, Loop, LoopSpec, OnSuccess, Retry
from support.running import Run, loop_over, playbook, step


def test_a_signal_that_denies_one_wait_denies_no_other() -> None:
    loop = loop_over([1, 2])
    run = Run(playbook(step("a", loop=loop, best_effort=True, kind="approval")))
    run.park("a.1/0#1", "approval", signal="a")
    run.park("a.1/1#1", "approval", signal="a")

    run.signal("a", approved=False)

    assert [fact.command_id for fact in run.of(CallFailed)] == ["a.1/0#1"]
    assert run.state.signals == []
    assert run.open == ["a.1/1#1"]


def test_a_page_of_a_frame_does_not_end_its_slot() -> None:
    loop = Loop(cursor=Cursor(claim="x"), spec=LoopSpec(mode="cursor", max_in_flight=2))
    pages = Retry(on_success=OnSuccess(condition="{{ response.more }}"))
    run = Run(playbook(step("a", loop=loop, retry=pages)))

    run.done("a.1/0#1", value={"more": True}, frame_rows=0)
    run.done("a.1/0@2#1", value={"more": True}, frame_rows=0)
    assert run.state.visits["a.1"].loop.slots_ended == 0  # type: ignore[index,union-attr]

    run.done("a.1/1#1", value={"more": False}, frame_rows=3)
    assert run.open == ["a.1/0@3#1", "a.1/2#1"]


@pytest.mark.parametrize("tool", ["{kind: wait, seconds: 1}", "{kind: playbook, path: child}"])
def test_what_waits_without_a_worker_has_no_pages(tool: str) -> None:
    content = f"""
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: p}}
workflow:
  - step: poll
    tool: {tool}
    retry: {{on_success: {{while: "{{{{ response.more }}}}"}}}}
"""
    with pytest.raises(PlaybookInvalidError, match="on_success"):
        parse_playbook(content, file="p.yaml")
