"""What can be set on a shard-manager: NOETL_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT, VNODE_COUNT
from noetl_core.process.config import Config


class ShardManagerConfig(Config, frozen=True, kw_only=True):
    shard_count: Annotated[
        int,
        Meta(
            gt=0,
            le=VNODE_COUNT,
            description="Shards of a new system; afterwards they change by `noetl shards resize`.",
        ),
    ] = SHARD_COUNT_DEFAULT
    shard_manager_interval_seconds: Annotated[
        float, Meta(gt=0, description="How often owners and processes are looked at.")
    ] = 2.0
    shard_retire_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="How long after a change of the shard count dropped shards are kept, at "
            "least. Not below the time for which JetStream keeps messages (an hour).",
        ),
    ] = 3_900.0
    server_sweep_interval: Annotated[
        float, Meta(gt=0, description="Seconds between two looks for processes that fell silent.")
    ] = 15.0
    server_offline_after: Annotated[
        float, Meta(gt=0, description="After so many seconds without a heartbeat it is offline.")
    ] = 45.0
    server_metrics_interval: Annotated[
        float, Meta(gt=0, description="Seconds between two records of what the workers reported.")
    ] = 60.0
    metrics_keep_seconds: Annotated[
        float, Meta(gt=0, description="How long reported metrics are kept.")
    ] = 604_800.0
    runtime_forget_seconds: Annotated[
        float, Meta(gt=60, description="After so long the row of an offline process is removed.")
    ] = 86_400.0
