"""What each part used: CPU seconds and peak memory, its child processes included."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from noetl_cli.stack.processes import ProcessRecord

_KIB = 1024
_MIB = 1024 * 1024


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    cpu_seconds: float
    peak_memory_mb: float


def cpu_seconds(parts: Iterable[ProcessRecord]) -> dict[str, float]:
    return {part.name: sum(map(_cpu_of, _tree(part.pid))) for part in parts}


def usage(parts: Iterable[ProcessRecord], before: dict[str, float]) -> dict[str, Usage]:
    """Since `before`. A peak is that of the process's whole life."""
    parts = tuple(parts)
    after = cpu_seconds(parts)
    return {
        part.name: Usage(
            cpu_seconds=round(after[part.name] - before.get(part.name, 0.0), 2),
            peak_memory_mb=round(_peak_bytes(_tree(part.pid)) / _MIB, 1),
        )
        for part in parts
    }


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _cpu_of(process: psutil.Process) -> float:
    """With that of the children it has outlived: a backend that ended counts for its postmaster."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _peak_bytes(processes: list[psutil.Process]) -> int:
    """Peaks added up; memory that the processes share (Postgres: its buffers) is counted once."""
    private, shared = 0, 0
    for process in processes:
        fields = _status(process.pid)
        common = fields.get("RssShmem", 0)
        private += max(fields.get("VmHWM", 0) - common, 0)
        shared = max(shared, common)
    return private + shared


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(kib) * _KIB for name, kib, _ in pairs}
