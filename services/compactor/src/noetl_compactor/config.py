"""What can be set on a compactor: NOETL_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from noetl_core.process.config import Config


class CompactorConfig(Config, frozen=True, kw_only=True):
    partition_weeks_ahead: Annotated[
        int, Meta(ge=1, le=52, description="Weeks for which partitions are made in advance.")
    ] = 4
    compactor_interval_seconds: Annotated[
        float, Meta(gt=0, description="How often partitions, retention and expiry are looked at.")
    ] = 60.0
    compactor_enabled: Annotated[
        bool,
        Meta(description="Archive what is past retention and drop it; false keeps everything."),
    ] = False
    retention_days: Annotated[
        float,
        Meta(ge=0, description="Executions that ended longer ago are archived, week by week."),
    ] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compactor_enabled and not self.archives:
            raise ValueError(
                "NOETL_COMPACTOR_ENABLED needs a place for archives: "
                "set NOETL_ARCHIVE_DIR or NOETL_STORE_DIR, or NOETL_S3_BUCKET"
            )
