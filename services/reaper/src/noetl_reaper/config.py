"""What can be set on a reaper: NOETL_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from noetl_core.process.config import Config


class ReaperConfig(Config, frozen=True, kw_only=True):
    reaper_interval_seconds: Annotated[
        float, Meta(gt=0, description="How often leases are looked at.")
    ] = 1.0
    reaper_lease_grace_seconds: Annotated[
        float, Meta(ge=0, description="How long after its end a lease counts as run out.")
    ] = 2.0
    reaper_return_wait_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="After a time without the database leases may have run out for want of it: "
            "how long workers then have to renew theirs. Two of their heartbeats.",
        ),
    ] = 10.0
    reaper_idle_interval_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="How often executions that do not move are looked for, and commands that "
            "have vanished from the queue.",
        ),
    ] = 10.0
    reaper_idle_seconds: Annotated[
        float,
        Meta(gt=0, description="An execution without anything under way for so long is idle."),
    ] = 30.0
    reaper_stuck_seconds: Annotated[
        float,
        Meta(gt=0, description="One that is still idle after so long is flagged as stuck."),
    ] = 120.0
    reaper_timer_poll_seconds: Annotated[
        float, Meta(gt=0, description="How often timers are looked at, at least.")
    ] = 0.2
    reaper_repeat_seconds: Annotated[
        float, Meta(gt=0, description="The same thing is reported again after so long.")
    ] = 15.0
    reaper_batch_size: Annotated[
        int, Meta(gt=0, le=2000, description="Reports of one turn, at most.")
    ] = 500
