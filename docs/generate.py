"""Writes docs/generated from the code: events, settings, subjects, metrics. Run by `./task docs`.

tests/architecture/test_generated_docs.py proves that what is committed is what this writes.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry

from noetl_core.domain.events import FACT_BY_TYPE
from noetl_core.process.config import Config, variables_of
from noetl_core.process.telemetry import exposition
from noetl_core.wire import subjects

ROOT = Path(__file__).parents[1]
SERVICES = sorted(path.parent.name for path in (ROOT / "services").glob("*/src"))


def main() -> None:
    folder = ROOT / "docs" / "generated"
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


def pages() -> dict[str, str]:
    return {
        "events.md": _page("Events", "libs/noetl_core/.../domain/events.py", _events()),
        "settings.md": _page("Settings", "the `config.py` of each service", _settings()),
        "subjects.md": _page("Subjects", "libs/noetl_core/.../wire/subjects.py", _subjects()),
        "metrics.md": _page("Metrics", "the `metrics.py` of each service", _metrics()),
    }


def _page(title: str, source: str, lines: Iterator[str]) -> str:
    head = f"# {title}\n\nWritten by `./task docs` from {source}. Do not edit.\n\n"
    return head + "\n".join(lines) + "\n"


def _events() -> Iterator[str]:
    yield "| event | fields | what it says |"
    yield "|---|---|---|"
    for name, kind in FACT_BY_TYPE.items():
        fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(kind))
        own = kind.__doc__ if "__doc__" in vars(kind) else None
        yield f"| `{name}` | {fields} | {_one_line(own)} |"


def _settings() -> Iterator[str]:
    yield "Every service reads:\n"
    yield from _setting_table(Config, common=frozenset())
    common = frozenset(field.name for field in msgspec.structs.fields(Config))
    for service in SERVICES:
        kind = _config_of(service)
        if any(field.name not in common for field in msgspec.structs.fields(kind)):
            yield f"\n## {service}\n"
            yield from _setting_table(kind, common=common)


def _config_of(service: str) -> type[Config]:
    module = importlib.import_module(f"noetl_{service.replace('-', '_')}.main")
    kind: type[Config] = module.SERVICE[1]
    return kind


def _setting_table(kind: type[Config], *, common: frozenset[str]) -> Iterator[str]:
    yield "| variable | default | what it does |"
    yield "|---|---|---|"
    for field in msgspec.structs.fields(kind):
        if field.name not in common:
            default = "(required)" if field.required else f"`{field.default!r}`"
            variables = " or ".join(f"`{name}`" for name in variables_of(field))
            yield f"| {variables} | {default} | {_description(field.type)} |"


def _description(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return next((_one_line(m.description) for m in get_args(kind) if isinstance(m, Meta)), "")
    return f"one of {', '.join(map(str, get_args(kind)))}" if get_args(kind) else ""


def _subjects() -> Iterator[str]:
    yield "```"
    yield inspect.cleandoc(subjects.__doc__ or "")
    yield "```"


def _metrics() -> Iterator[str]:
    yield "The names are those of `/metrics`. Of a histogram it shows `NAME_bucket`, `NAME_sum` and"
    yield "`NAME_count`. Over OTLP most counters go without their `_total`.\n"
    yield "| metric | type | unit | service | what it says |"
    yield "|---|---|---|---|---|"
    declared = [(service, metric) for service, file in _metric_files() for metric in _of(file)]
    names = _exposed(metric for _, metric in declared)
    for service, metric in declared:
        says = f"{metric.unit} | {service} | {_one_line(metric.description)}"
        yield f"| `{names[metric.name]}` | {metric.type} | {says} |"


def _exposed(metrics: Iterable["_Metric"]) -> dict[str, str]:
    """What the exporter makes of the names: it is asked, for it has rules for units, too."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry)
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("docs")
    for metric in metrics:
        # Where it describes a metric, the exporter says both: its own name, and this.
        described = {"unit": metric.unit, "description": metric.name}
        match metric.type:
            case "counter":
                meter.create_counter(metric.name, **described).add(1)
            case "gauge":
                meter.create_gauge(metric.name, **described).set(1)
            case "histogram":
                meter.create_histogram(metric.name, **described).record(1)
    helped = re.findall(r"^# HELP (\S+) (\S+)$", exposition(registry).decode(), re.MULTILINE)
    return {declared: exposed for exposed, declared in helped}


def _metric_files() -> Iterator[tuple[str, Path]]:
    core = ROOT / "libs" / "noetl_core" / "src" / "noetl_core"
    yield "every process", core / "process" / "metrics.py"
    yield "whoever reads results", core / "blob" / "metrics.py"
    for service in SERVICES:
        package = f"noetl_{service.replace('-', '_')}"
        yield service, ROOT / "services" / service / "src" / package / "metrics.py"


class _Metric(NamedTuple):
    name: str
    type: str
    unit: str
    description: str


def _of(file: Path) -> list[_Metric]:
    return sorted(_declared(file.read_text()))


def _declared(source: str) -> Iterator[_Metric]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.startswith("create_")
        ):
            keywords = {
                word.arg: str(word.value.value)
                for word in node.keywords
                if word.arg and isinstance(word.value, ast.Constant)
            }
            first = node.args[0] if node.args else None
            name = str(first.value) if isinstance(first, ast.Constant) else keywords["name"]
            # create_observable_counter, for one
            kind = node.func.attr.split("_")[-1]
            yield _Metric(name, kind, keywords.get("unit", ""), keywords.get("description", ""))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
