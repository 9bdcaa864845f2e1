"""The environment of every service of a stack: the user's, with what only the supervisor knows."""

import contextlib
from collections.abc import Mapping

from noetl_cli.stack.data_dir import DataDir

SHARD_LEASE_SECONDS = 5.0
COMMAND_LEASE_SECONDS = 10.0
"""Short: on one machine, what was killed is started again at once, and nobody should wait long."""

# By all the names that the services understand, their own one first. Their configurations say them
# too, but to import those takes longer than the rest of the start.
SHARD_LEASE_NAMES = ("NOETL_SHARD_LEASE_SECONDS", "NOETL_SHARD_LEASE_SEC")
SHARD_HEARTBEAT_NAMES = ("NOETL_SHARD_HEARTBEAT_SECONDS", "NOETL_SHARD_HEARTBEAT_SEC")
COMMAND_LEASE_NAMES = ("NOETL_LEASE_SECONDS", "NOETL_COMMAND_HEARTBEAT_TIMEOUT_SECONDS")
COMMAND_HEARTBEAT_NAMES = ("NOETL_HEARTBEAT_SECONDS",)

_HEARTBEATS_PER_LEASE = 5


def service_environment(
    user: Mapping[str, str], data_dir: DataDir, places: Mapping[str, str]
) -> dict[str, str]:
    """What the user has set wins over our defaults, but not over where the parts are."""
    defaults = {
        "NOETL_ENCRYPTION_KEY": data_dir.encryption_key(),
        "NOETL_STORE_DIR": str(data_dir.store),
    }
    leases = {
        **_fitting(user, SHARD_LEASE_NAMES, SHARD_HEARTBEAT_NAMES, SHARD_LEASE_SECONDS),
        **_fitting(user, COMMAND_LEASE_NAMES, COMMAND_HEARTBEAT_NAMES, COMMAND_LEASE_SECONDS),
    }
    return defaults | dict(user) | leases | dict(places)


def _fitting(
    user: Mapping[str, str],
    lease_names: tuple[str, ...],
    heartbeat_names: tuple[str, ...],
    lease_seconds: float,
) -> dict[str, str]:
    """Of a lease and its heartbeat what the user has not set; if it is one, it fits the other."""
    lease, heartbeat = _value(user, lease_names), _value(user, heartbeat_names)
    heartbeat_seconds = lease_seconds / _HEARTBEATS_PER_LEASE
    # A value that is no number is passed on as it is: the service says what is wrong with it.
    with contextlib.suppress(ValueError):
        heartbeat_seconds = float(lease or lease_seconds) / _HEARTBEATS_PER_LEASE
    with contextlib.suppress(ValueError):
        lease_seconds = max(lease_seconds, float(heartbeat or 0) * _HEARTBEATS_PER_LEASE)
    ours = {} if lease else {lease_names[0]: str(lease_seconds)}
    return ours if heartbeat else ours | {heartbeat_names[0]: str(heartbeat_seconds)}


def _value(user: Mapping[str, str], names: tuple[str, ...]) -> str:
    """As the services read it: what is empty is not set, and neither is a 0 by another name."""
    for name in names:
        text = user.get(name, "").strip()
        if text and (text != "0" or name == names[0]):
            return text
    return ""
