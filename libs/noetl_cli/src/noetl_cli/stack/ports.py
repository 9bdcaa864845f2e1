"""Which ports a stack listens on: free ones, chosen once and kept in its data directory.

They are taken below the range the kernel gives to outgoing connections. A client that tries again
and again to reach a port of that range while nobody listens there is in the end given this very
port as its own, talks to itself, and the server cannot come back.
"""

import random
import socket
from pathlib import Path

HOST = "127.0.0.1"

_FIRST = 15_000
_OUTGOING_DEFAULT = 32_768
_OUTGOING_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES_MAX = 200


def choose_ports(names: list[str], kept: dict[str, int]) -> dict[str, int]:
    """The kept port of each name if it is still free, else a new one."""
    ports: dict[str, int] = {}
    for name in names:
        port = kept.get(name)
        usable = port is not None and port not in ports.values() and is_free(port)
        ports[name] = port if port is not None and usable else _free_port(set(ports.values()))
    return ports


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers do: a port in TIME_WAIT after a crash is free for them.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _free_port(taken: set[int]) -> int:
    last = _first_outgoing_port()
    for _ in range(_TRIES_MAX):
        port = random.randrange(_FIRST, last)  # noqa: S311 - not a secret
        if port not in taken and is_free(port):
            return port
    raise OSError(f"no free port between {_FIRST} and {last} on {HOST}")


def _first_outgoing_port() -> int:
    try:
        first = int(_OUTGOING_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _OUTGOING_DEFAULT
    return first if first > _FIRST + _TRIES_MAX else _OUTGOING_DEFAULT
