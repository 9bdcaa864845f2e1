"""`wait`: for a while, until a moment, or for a signal. Nobody waits here: a timer of the broker
does, and `timeout` says how long a signal is waited for.
"""

from datetime import UTC, datetime
from typing import Any

from noetl_core.domain.reader import duration
from noetl_core.process.clock import unix_ms
from noetl_worker.tools.tool import ToolCall, ToolFailedError, ToolParked, ToolResult, wrong_field

WAIT_SECONDS_MAX = 10 * 366 * 86400.0


class WaitTool:
    kind = "wait"

    async def run(self, call: ToolCall) -> ToolResult | ToolParked:
        if call.config.get("signal") is not None:
            signal = _signal(call.config["signal"])
            return ToolParked(
                signal=signal, until_ms=None if call.timeout_s is None else after(call.timeout_s)
            )
        until_ms = _until_ms(call.config)
        return ToolResult() if until_ms <= unix_ms() else ToolParked(until_ms=until_ms)

    async def close(self) -> None:
        pass


def after(seconds: float) -> int:
    return unix_ms() + round(seconds * 1000)


def _until_ms(config: Any) -> int:
    if config.get("seconds") is not None:
        return after(_seconds(config["seconds"]))
    if config.get("until") is not None:
        return _moment(config["until"])
    raise wrong_field("seconds", "is missing: a wait has `seconds`, `until` or `signal`")


def _seconds(value: Any) -> float:
    seconds = duration(value)
    if seconds is None or seconds > WAIT_SECONDS_MAX:
        raise wrong_field("seconds", f"must be a duration such as 90, 30s, 5m or 2d, not {value!r}")
    return seconds


def _moment(value: Any) -> int:
    """A time without a zone is UTC."""
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _no_moment(value) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    moment_ms = round(moment.timestamp() * 1000)
    if moment_ms > after(WAIT_SECONDS_MAX):
        raise _no_moment(value)
    return moment_ms


def _no_moment(value: Any) -> ToolFailedError:
    example = "2030-01-31T09:00:00+01:00"
    return wrong_field(
        "until", f"must be a time such as {example} in the near years, not {value!r}"
    )


def _signal(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise wrong_field("signal", f"must be the name of a signal, not {value!r}")
    return value
