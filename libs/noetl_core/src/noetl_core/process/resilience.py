"""Which errors pass by themselves, and how long to wait for that."""

import nats.errors
import nats.js.errors

from noetl_core.domain.errors import RetryableError
from noetl_core.store.postgres import is_postgres_away

BACKOFF_SECONDS_MIN = 0.1
BACKOFF_SECONDS_MAX = 1.0
"""A Postgres that restarts is back within seconds, and whoever sleeps through that makes the outage
longer. To try once a second costs next to nothing."""

_NATS_AWAY: tuple[type[Exception], ...] = (
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.NoRespondersError,
    nats.errors.NoServersError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
    nats.errors.TimeoutError,
    nats.js.errors.ServiceUnavailableError,
)


def is_transient(error: BaseException) -> bool:
    """True when the same turn may succeed later: a lost connection, or an error that says so."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_transient(part) for part in error.exceptions)
    return isinstance(error, (RetryableError, *_NATS_AWAY)) or is_postgres_away(error)


def backoff_seconds(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    assert failures > 0, failures
    return min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2.0 ** min(failures - 1, 10))
