"""support/postgres.py: who gets which port."""

import socket

import pytest

from support import postgres
from support.postgres import free_port, slice_of_ports


def test_no_port_is_given_twice_though_nobody_has_taken_the_first() -> None:
    ports = [free_port() for _ in range(50)]

    assert len(set(ports)) == 50


def test_a_port_on_which_somebody_listens_is_given_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, free = free_port(), free_port()
    monkeypatch.setattr(postgres, "_ports", iter([taken, free]))

    with socket.create_server(("127.0.0.1", taken)):
        assert free_port() == free


def test_workers_of_one_run_are_given_different_ports() -> None:
    slices = [set(slice_of_ports(worker, pid=7)) for worker in ("", "gw0", "gw1", "gw2", "gw3")]

    assert len(set().union(*slices)) == sum(map(len, slices))
