"""What can be set on a projection: NOETL_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from noetl_core.process.ownership import ShardConfig


class ProjectionConfig(ShardConfig, frozen=True, kw_only=True):
    projection_batch_size: Annotated[
        int, Meta(gt=0, le=10_000, description="Events of a shard that are folded in one turn.")
    ] = 500
    projection_batch_window_ms: Annotated[
        int, Meta(ge=0, description="Turns begin at least so far apart, unless we are behind.")
    ] = 100
    projection_poll_ms: Annotated[
        int, Meta(gt=0, description="How often the log is looked at when nobody wakes us.")
    ] = 100
    projection_executions_max: Annotated[
        int, Meta(gt=0, description="Executions whose state is kept in memory.")
    ] = 10_000
    projection_states_mb: Annotated[
        float,
        Meta(gt=0, description="And of how much, as JSON; in memory it is up to seven times that."),
    ] = 32.0
    projection_audit_interval_seconds: Annotated[
        float, Meta(ge=0, description="How often rows are compared with their log; 0 for never.")
    ] = 60.0
    projection_audit_executions: Annotated[
        int, Meta(gt=0, le=1000, description="Of the newest and of the others, compared each time.")
    ] = 5
