"""What can be set on a broker: NOETL_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from noetl_broker.accept import COMMAND_ATTEMPTS_MAX
from noetl_core.process.ownership import ShardConfig


class BrokerConfig(ShardConfig, frozen=True, kw_only=True):
    broker_batch_size: Annotated[
        int, Meta(gt=0, le=5000, description="Bodies taken into one commit, at most.")
    ] = 500
    broker_inbox_poll_seconds: Annotated[
        float, Meta(gt=0, description="How often the inbox is read when nobody wakes us.")
    ] = 0.2
    broker_inbox_poll_away_seconds: Annotated[
        float, Meta(gt=0, description="The same while NATS is away and nobody can wake us.")
    ] = 0.05
    checkpoint_interval_ms: Annotated[
        int,
        Meta(gt=0, description="How often we close epochs ourselves while NATS is away."),
    ] = 1000
    broker_states_max: Annotated[
        int, Meta(gt=0, description="Executions whose state is kept in memory.")
    ] = 10_000
    broker_states_mb: Annotated[
        float,
        Meta(gt=0, description="And of how much, as JSON; in memory it is up to eight times that."),
    ] = 32.0
    command_attempts_max: Annotated[
        int, Meta(gt=0, le=1000, description="A command that is lost so often has failed.")
    ] = COMMAND_ATTEMPTS_MAX
