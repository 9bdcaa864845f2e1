"""What can be set on a worker: NOETL_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from noetl_core.process.config import Config, ConfigError

_HEARTBEATS_PER_LEASE_MIN = 3


class WorkerConfig(Config, frozen=True, kw_only=True):
    worker_pool: Annotated[
        str, Meta(min_length=1, description="Commands of this pool are run here.")
    ] = "cpu"
    worker_slots: Annotated[
        int, Meta(gt=0, le=1000, description="Commands that run at the same time.")
    ] = 64
    lease_seconds: Annotated[
        float, Meta(gt=0, description="How long a command stays ours without a heartbeat.")
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


def check_config(config: WorkerConfig) -> None:
    """What two fields must be to each other."""
    if config.heartbeat_seconds * _HEARTBEATS_PER_LEASE_MIN > config.lease_seconds:
        raise ConfigError(
            f"NOETL_LEASE_SECONDS={config.lease_seconds}: must be at least "
            f"{_HEARTBEATS_PER_LEASE_MIN} times NOETL_HEARTBEAT_SECONDS={config.heartbeat_seconds}"
        )
