"""What the reaper measures."""

from noetl_core.process.telemetry import meter

_meter = meter("reaper")

REPORTS = _meter.create_counter(
    "noetl_reaper_reports",
    description=(
        "What was reported to the broker, by kind (expired, idle, due) and road (nats, inbox)."
    ),
)
