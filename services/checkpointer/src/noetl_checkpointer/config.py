"""What can be set on a checkpointer: NOETL_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from noetl_core.process.config import Config


class CheckpointerConfig(Config, frozen=True, kw_only=True):
    checkpoint_interval_ms: Annotated[
        int, Meta(gt=0, description="How often the epoch of a busy shard is closed.")
    ] = 1000
    checkpoint_record_interval_ms: Annotated[
        int, Meta(gt=0, description="How often closed epochs are looked for and recorded.")
    ] = 100
    checkpoint_batch_size: Annotated[
        int, Meta(gt=0, description="Closes of epochs that are recorded of each shard in one turn.")
    ] = 5000
