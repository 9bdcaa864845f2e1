"""What can be set on a worker: NOETL_<FIELD>."""

import socket
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from noetl_core.domain.workers import LABEL_NAME, LABEL_VALUE, POOL_LABEL, POOL_NAME
from noetl_core.process.config import Config, ConfigError, also

_HEARTBEATS_PER_LEASE_MIN = 3
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class WorkerConfig(Config, frozen=True, kw_only=True):
    worker_pool: Annotated[
        str,
        Meta(
            min_length=1,
            description="Commands of this pool are run here; cpu,gpu for several.",
            extra=also("NOETL_WORKER_POOL_RUNTIME"),
        ),
    ] = "cpu"
    worker_slots: Annotated[
        int,
        Meta(
            gt=0,
            le=1000,
            description="Commands that run at the same time.",
            extra=also("NOETL_WORKER_CAPACITY"),
        ),
    ] = 64
    worker_pool_name: Annotated[
        str, Meta(description="What lists call the pool; by default worker- and the pool.")
    ] = ""
    worker_uri: Annotated[
        str,
        Meta(
            description="Where it is, as its registration says; by default k8s://NAMESPACE/POD in "
            "a pod of Kubernetes, local://HOST elsewhere."
        ),
    ] = ""
    worker_labels: Annotated[
        tuple[str, ...], Meta(description="What this worker has, such as gpu,zone=eu.")
    ] = ()
    worker_tool_slots: Annotated[
        tuple[str, ...],
        Meta(description="Calls of a tool that run at the same time, such as python=2,http=50."),
    ] = ()
    worker_heartbeat_interval: Annotated[
        float, Meta(gt=0, le=30, description="Seconds between two reports of its capacity.")
    ] = 5.0
    lease_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="How long a command stays ours without a heartbeat.",
            extra=also("NOETL_COMMAND_HEARTBEAT_TIMEOUT_SECONDS"),
        ),
    ] = 60.0
    heartbeat_seconds: Annotated[
        float, Meta(gt=0, description="How often leases are renewed and results confirmed.")
    ] = 5.0
    poll_seconds: Annotated[
        float, Meta(gt=0, description="How often an idle worker looks when nobody wakes it.")
    ] = 1.0
    poll_away_seconds: Annotated[
        float, Meta(gt=0, description="The same while NATS is away and nobody can wake it.")
    ] = 0.1
    drain_seconds: Annotated[
        float, Meta(ge=0, le=9, description="How long running commands may go on at the stop.")
    ] = 8.0
    python_processes: Annotated[
        int, Meta(gt=0, le=256, description="Warm child processes for Python code.")
    ] = 2
    python_memory_mb: Annotated[
        int, Meta(ge=0, description="Address space of a child in MiB; 0 for no limit.")
    ] = 4096
    python_cpu_seconds: Annotated[
        int, Meta(ge=0, description="Processor time of one call in a child; 0 for no limit.")
    ] = 3600
    shell_memory_mb: Annotated[
        int, Meta(ge=0, description="Address space of a shell command in MiB; 0 for no limit.")
    ] = 4096
    shell_cpu_seconds: Annotated[
        int, Meta(ge=0, description="Processor time of a shell command; 0 for no limit.")
    ] = 3600
    duckdb_calls: Annotated[
        int, Meta(gt=0, le=256, description="Calls of DuckDB that run at the same time.")
    ] = 4
    duckdb_memory_mb: Annotated[
        int, Meta(ge=16, description="Memory of one call of DuckDB in MiB; more goes to disk.")
    ] = 512
    duckdb_threads: Annotated[int, Meta(gt=0, description="Threads of one call of DuckDB.")] = 2
    duckdb_extension_dir: Annotated[
        str, Meta(description="Where DuckDB finds extensions; empty for its own directory.")
    ] = ""
    result_cache_mb: Annotated[
        int, Meta(ge=0, description="Results of other steps that are kept in memory, in MiB.")
    ] = 64
    encryption_key: Annotated[
        str, Meta(description="Opens credentials: 32 bytes in base64; empty for none.")
    ] = ""

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.strip() for part in self.worker_pool.split(",")))


def uri_of(config: WorkerConfig, *, namespace_file: Path = _NAMESPACE_FILE) -> str:
    """A pod knows its namespace from a file, and is called what its host is called."""
    host = socket.gethostname()
    if config.worker_uri:
        return config.worker_uri
    try:
        return f"k8s://{namespace_file.read_text().strip()}/{host}"
    except OSError:
        return f"local://{host}"


def labels_of(config: WorkerConfig) -> dict[str, str]:
    """`gpu,zone=eu` is {"gpu": "true", "zone": "eu"}; the pool is a label, too."""
    name = config.worker_pool_name or f"worker-{config.worker_pool}"
    return own_labels(config) | {POOL_LABEL: ",".join(config.pools), "pool_name": name}


def own_labels(config: WorkerConfig) -> dict[str, str]:
    pairs = (label.partition("=") for label in config.worker_labels)
    return {name.strip(): value.strip() or "true" for name, _, value in pairs}


def check_config(config: WorkerConfig) -> None:
    """What two fields must be to each other, and what is in a text."""
    for pool in config.pools:
        if not POOL_NAME.fullmatch(pool):
            raise ConfigError(
                f"NOETL_WORKER_POOL={config.worker_pool!r}: a pool is a name of letters, "
                "digits, - and _"
            )
    for name, value in own_labels(config).items():
        if not (LABEL_NAME.fullmatch(name) and LABEL_VALUE.fullmatch(value)):
            raise ConfigError(
                f"NOETL_WORKER_LABELS: {name}={value} is no label such as gpu=true or zone=eu"
            )
    if config.heartbeat_seconds * _HEARTBEATS_PER_LEASE_MIN > config.lease_seconds:
        raise ConfigError(
            f"NOETL_LEASE_SECONDS={config.lease_seconds}: must be at least "
            f"{_HEARTBEATS_PER_LEASE_MIN} times NOETL_HEARTBEAT_SECONDS={config.heartbeat_seconds}"
        )
