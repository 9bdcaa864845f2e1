"""What can be set on a shard-manager: NOETL_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from noetl_core.process.config import Config


class ShardManagerConfig(Config, frozen=True, kw_only=True):
    shard_manager_interval_seconds: Annotated[
        float, Meta(gt=0, description="How often owners and processes are looked at.")
    ] = 2.0
    runtime_offline_seconds: Annotated[
        float, Meta(gt=0, description="Without a heartbeat for so long a process is offline.")
    ] = 45.0
    runtime_forget_seconds: Annotated[
        float, Meta(gt=60, description="After so long the row of an offline process is removed.")
    ] = 86_400.0
