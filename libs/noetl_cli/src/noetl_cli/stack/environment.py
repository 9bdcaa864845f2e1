"""The environment of every service of a stack: the user's, with what only the supervisor knows."""

import contextlib
from collections.abc import Mapping

from noetl_cli.stack.data_dir import DataDir

SHARD_LEASE_SECONDS = 5.0
"""Short: on one machine, what was killed is soon started again, and should not wait long."""

_HEARTBEATS_PER_LEASE = 4


def service_environment(
    user: Mapping[str, str], data_dir: DataDir, places: Mapping[str, str]
) -> dict[str, str]:
    """What the user has set wins over our defaults, but not over where the parts are."""
    defaults = {
        "NOETL_ENCRYPTION_KEY": data_dir.encryption_key(),
        "NOETL_STORE_DIR": str(data_dir.store),
        "NOETL_SHARD_LEASE_SECONDS": str(SHARD_LEASE_SECONDS),
        "NOETL_SHARD_HEARTBEAT_SECONDS": str(_heartbeat_seconds(user)),
    }
    return defaults | dict(user) | dict(places)


def _heartbeat_seconds(user: Mapping[str, str]) -> float:
    """Fits a lease that the user has shortened without a word about heartbeats."""
    lease_seconds = SHARD_LEASE_SECONDS
    with contextlib.suppress(KeyError, ValueError):
        lease_seconds = float(user["NOETL_SHARD_LEASE_SECONDS"])
    return lease_seconds / _HEARTBEATS_PER_LEASE
