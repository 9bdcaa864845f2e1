"""The environment of every service of a stack: the user's, with what only the supervisor knows."""

import contextlib
from collections.abc import Mapping

from noetl_cli.stack.data_dir import DataDir

SHARD_LEASE_SECONDS = 5.0
COMMAND_LEASE_SECONDS = 10.0
"""Short: on one machine, what was killed is started again at once, and nobody should wait long."""

_HEARTBEATS_PER_LEASE = 5


def service_environment(
    user: Mapping[str, str], data_dir: DataDir, places: Mapping[str, str]
) -> dict[str, str]:
    """What the user has set wins over our defaults, but not over where the parts are."""
    defaults = {
        "NOETL_ENCRYPTION_KEY": data_dir.encryption_key(),
        "NOETL_STORE_DIR": str(data_dir.store),
        **_lease(user, "NOETL_SHARD_", SHARD_LEASE_SECONDS),
        **_lease(user, "NOETL_", COMMAND_LEASE_SECONDS),
    }
    return defaults | dict(user) | dict(places)


def _lease(user: Mapping[str, str], prefix: str, lease_seconds: float) -> dict[str, str]:
    """A lease and its heartbeat; where the user has set one of the two, the other fits it."""
    lease, heartbeat = f"{prefix}LEASE_SECONDS", f"{prefix}HEARTBEAT_SECONDS"
    heartbeat_seconds = lease_seconds / _HEARTBEATS_PER_LEASE
    # A value that is no number is passed on as it is: the service says what is wrong with it.
    with contextlib.suppress(KeyError, ValueError):
        heartbeat_seconds = float(user[lease]) / _HEARTBEATS_PER_LEASE
    with contextlib.suppress(KeyError, ValueError):
        lease_seconds = max(lease_seconds, float(user[heartbeat]) * _HEARTBEATS_PER_LEASE)
    return {lease: str(lease_seconds), heartbeat: str(heartbeat_seconds)}
