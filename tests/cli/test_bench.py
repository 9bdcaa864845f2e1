"""`noetl bench`: one line of measured figures per workload."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.stacks import DevStack, noetl, noetl_process
from noetl_cli.bench.log_figures import percentiles
from noetl_cli.bench.usage import cpu_seconds, usage
from noetl_cli.stack.processes import record_of
from noetl_core.blob.place import Place

KEYS = {
    "bench", "n", "tasks", "seconds", "tasks_per_second", "latency_of", "p50_ms", "p99_ms",
    "events_per_task", "services", "cpus", "write_path", "ratio_to_write_path",
}  # fmt: skip


def measured(stack: DevStack, name: str, n: int) -> dict[str, Any]:
    answer = noetl("bench", name, "--n", str(n), "--json", "--data-dir", stack.data_dir)
    assert answer.returncode == 0, answer.stderr
    (line,) = answer.stdout.splitlines()
    figures: dict[str, Any] = json.loads(line)
    assert figures.keys() == KEYS
    # Seconds are shown to the millisecond and the rate to a tenth: it lies between these.
    tasks, seconds = figures["tasks"], figures["seconds"]
    slowest, fastest = tasks / (seconds + 0.0005), tasks / (seconds - 0.0005)
    assert slowest - 0.1 <= figures["tasks_per_second"] <= fastest + 0.1
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert figures["services"].keys() == {"postgres", "nats", "engine", "worker-1"}
    return figures


def test_fanout_is_compared_with_the_bare_write_path_of_the_same_run(stack: DevStack) -> None:
    figures = measured(stack, "fanout", 300)

    assert figures["tasks"] == 300
    assert figures["latency_of"] == "task"
    assert 3 <= figures["events_per_task"] <= 4
    bare = figures["write_path"]
    assert bare["n"] == 300
    assert figures["ratio_to_write_path"] == pytest.approx(
        figures["tasks_per_second"] / bare["tasks_per_second"], abs=0.001
    )
    assert figures["services"]["worker-1"]["cpu_seconds"] > 0
    assert figures["services"]["postgres"]["peak_memory_mb"] > 20


@pytest.mark.parametrize(
    ("name", "n", "tasks", "latency_of"),
    [
        ("chain", 10, 10, "step"),
        ("many", 6, 18, "execution"),
        ("latency", 3, 3, "execution"),
        ("payload", 4, 4, "task"),
    ],
)
def test_every_workload_counts_its_tasks(
    stack: DevStack, name: str, n: int, tasks: int, latency_of: str
) -> None:
    figures = measured(stack, name, n)

    assert figures["tasks"] == tasks
    assert figures["latency_of"] == latency_of
    assert figures["write_path"] is None


@pytest.mark.slow
@pytest.mark.measured
def test_without_a_running_system_it_measures_one_of_its_own_service_by_service() -> None:
    answer = noetl_process("bench", "latency", "--n", "2", "--json")

    assert answer.returncode == 0, answer.stderr
    services = json.loads(answer.stdout)["services"]
    assert {
        "api-gateway",
        "broker",
        "projection",
        "worker-1",
        "postgres",
        "nats",
    } <= services.keys()


def test_an_unknown_workload_is_a_usage_error_that_names_the_known_ones() -> None:
    answer = noetl("bench", "speed")

    assert answer.returncode == 2
    assert "fanout" in answer.stderr


def test_percentiles_are_values_that_were_measured() -> None:
    figures = percentiles([float(n) for n in range(100, 0, -1)])

    assert (figures.p50_ms, figures.p99_ms) == (51.0, 100.0)


def test_the_cpu_of_a_child_that_ended_counts_for_its_parent() -> None:
    part = record_of("ours", os.getpid())
    before = cpu_seconds([part])
    subprocess.run(["sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"], check=True)

    used = usage([part], before)["ours"]

    assert used.cpu_seconds > 0
    assert used.peak_memory_mb > 10


def test_compaction_is_measured_from_the_first_row_to_the_drop() -> None:
    answer = noetl("bench", "compact", "--n", "1000", "--json")

    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert figures["events"] == 1000
    assert figures["events_per_second"] == pytest.approx(1000 / figures["seconds"], rel=0.01)


def test_a_place_that_cannot_take_an_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    answer = noetl("bench", "compact", "--n", "1000", "--archive-dir", str(tmp_path / "file"))

    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    assert f"the archive in {tmp_path}/file/" in answer.stderr


async def test_compaction_is_measured_wherever_archives_go_and_leaves_nothing_there(
    place: Place, place_environment: dict[str, str]
) -> None:
    at = place_environment["NOETL_ARCHIVE_DIR"]

    answer = noetl_process(
        *("bench", "compact", "--n", "1000", "--shards", "4", "--json", "--archive-dir", at),
        home=None,
        **place_environment,
    )

    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert (figures["place"], figures["shards"]) == (place.tier, 4)
    assert figures["events_per_second_per_shard"] == pytest.approx(
        figures["events_per_second"] / 4, rel=0.01
    )
    assert await place.names() == []
