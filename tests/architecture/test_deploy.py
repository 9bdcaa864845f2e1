"""What deploy/ and the pages say of each other."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "noetl"
ALERTS = ROOT / "deploy" / "alerts" / "noetl.yaml"
_METRIC = re.compile(r"\bnoetl_\w+")


def test_an_image_is_built_under_the_name_that_the_chart_asks_for() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    repository = yaml.safe_load((CHART / "values.yaml").read_text())["image"]["repository"]

    built = re.findall(r"docker build .* -t (\S+) ", (ROOT / "docs" / "operations.md").read_text())

    assert built == [f"{repository}/broker:{chart['appVersion']}"]


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_that_are_shown_and_says_what_to_do(rule: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "generated" / "metrics.md").read_text()

    asked = set(_METRIC.findall(rule["expr"]))

    assert asked
    assert asked <= set(_METRIC.findall(page))
    assert rule["annotations"]["description"]


def services_with_a_leader() -> list[str]:
    mains = sorted((ROOT / "services").glob("*/src/*/main.py"))
    return [main.parents[2].name for main in mains if "leadership(" in main.read_text()]


@pytest.mark.parametrize("service", services_with_a_leader())
def test_somebody_is_woken_when_nobody_leads(service: str) -> None:
    """No metric of their own says so: who is not there shows nothing."""
    absent = f'absent(increase(noetl_heartbeats_total{{kind="{service}", outcome="ok"}}[5m]) > 0)'

    assert absent in [rule["expr"] for rule in rules()]


def test_it_is_the_four_that_elect_a_leader() -> None:
    four = ["checkpointer", "compactor", "reaper", "shard-manager"]

    assert services_with_a_leader() == four


def test_there_is_an_alert_on_whatever_operations_say_to_alert_on() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    named = {
        metric
        for line in operations.splitlines()
        if re.search(r"\balert (on|above)\b", line, re.IGNORECASE)
        for metric in _METRIC.findall(line)
    }

    assert "noetl_projection_lag_ms" in named
    assert named <= {metric for rule in rules() for metric in _METRIC.findall(rule["expr"])}
