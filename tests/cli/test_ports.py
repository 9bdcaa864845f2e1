"""Which ports a stack takes."""

import socket
from pathlib import Path

from noetl_cli.stack.ports import HOST, choose_ports, is_free


def test_ports_differ_and_lie_below_the_range_of_outgoing_connections() -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])

    ports = choose_ports(["postgres", "nats", "gateway"], {})

    assert len(set(ports.values())) == 3
    assert all(1024 < port < first_outgoing for port in ports.values())


def test_a_kept_port_is_used_again_while_it_is_free() -> None:
    kept = choose_ports(["nats"], {})

    assert choose_ports(["nats"], kept) == kept


def test_a_kept_port_that_somebody_took_is_replaced() -> None:
    kept = choose_ports(["nats"], {})
    with socket.create_server((HOST, kept["nats"])):
        assert not is_free(kept["nats"])
        assert choose_ports(["nats"], kept) != kept
