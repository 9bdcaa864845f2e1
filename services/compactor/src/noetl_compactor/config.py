"""What can be set on a compactor: NOETL_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from noetl_core.process.config import Config


class CompactorConfig(Config, frozen=True, kw_only=True):
    partition_weeks_ahead: Annotated[
        int, Meta(ge=1, le=52, description="Weeks for which partitions are made in advance.")
    ] = 4
    compactor_interval_seconds: Annotated[
        float, Meta(gt=0, description="How often the partitions are looked at.")
    ] = 60.0
