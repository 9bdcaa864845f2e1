"""What deploy/ and the pages say of each other."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "noetl"


def test_an_image_is_built_under_the_name_that_the_chart_asks_for() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    repository = yaml.safe_load((CHART / "values.yaml").read_text())["image"]["repository"]

    built = re.findall(r"docker build .* -t (\S+) ", (ROOT / "docs" / "operations.md").read_text())

    assert built == [f"{repository}/broker:{chart['appVersion']}"]
