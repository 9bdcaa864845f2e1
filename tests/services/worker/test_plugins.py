"""Tools that other packages bring."""

from pathlib import Path

import pytest

from noetl_core.domain.ids import StepName
from noetl_core.domain.parse import parse_playbook
from noetl_worker.tools.noop import NoopTool
from noetl_worker.tools.registry import with_plugins
from services.worker import calls

MODULE = """
from noetl_worker.tools.tool import ToolResult

class Mailer:
    kind = "acme.mailer"
    async def run(self, call):
        return ToolResult(f"to {call.config['to']}")
    async def close(self):
        pass

class Undotted(Mailer):
    kind = "mailer"

class Impostor(Mailer):
    kind = "noop"
"""
ENTRY_POINTS = """
[noetl.tools]
mailer = acme_tools:Mailer
undotted = acme_tools:Undotted
impostor = acme_tools:Impostor
"""
PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: mail}
workflow:
  - step: send
    tool: {kind: acme.mailer, to: "{{ workload.to }}", anything: 1}
workload: {to: me}
"""


async def test_a_plugin_brings_kinds_with_a_dot_and_takes_over_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_tools.py").write_text(MODULE)
    package = tmp_path / "acme_tools-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tools\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    ours = NoopTool()

    tools = with_plugins([ours])

    mailer = tools.find("acme.mailer")
    assert mailer is not None
    assert tools.kinds == ["acme.mailer", "noop"]
    assert tools.find("noop") is ours
    assert await calls.data(mailer, config={"to": "me"}) == "to me"


def test_a_playbook_may_name_a_kind_with_a_dot_and_give_it_any_field() -> None:
    (task,) = parse_playbook(PLAYBOOK, file="mail.yaml").steps[StepName("send")].tool

    assert task.kind == "acme.mailer"
    assert task.config == {"to": "{{ workload.to }}", "anything": 1}
