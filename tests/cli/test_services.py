"""The services of a stack as programs."""

import socket

from noetl_cli.stack.ports import HOST, choose_ports
from noetl_cli.stack.services import HEALTH_PORT, on_free_port, service_names, service_programs


def test_every_part_is_told_a_port_of_its_own() -> None:
    names = service_names(workers=2, is_separate=True, brokers=2)
    ports = choose_ports(names, {})

    programs = service_programs({}, stack="here", gateway_port=1, health_ports=ports)

    told = {program.name: program.environment[HEALTH_PORT] for program in programs}
    assert told == {name: str(port) for name, port in ports.items()}
    assert {"broker", "broker-2", "worker-1", "worker-2"} <= told.keys()
    modules = {program.name: program.command[-1] for program in programs}
    assert modules["broker-2"] == modules["broker"] == "noetl_broker.main"


def test_a_part_that_starts_again_keeps_its_port_while_nobody_else_has_it() -> None:
    ports = choose_ports(["engine"], {})
    (engine,) = service_programs({}, stack="here", gateway_port=1, health_ports=ports)

    assert on_free_port(engine).health_port == engine.health_port

    with socket.create_server((HOST, engine.health_port)):
        elsewhere = on_free_port(engine)
    assert elsewhere.health_port != engine.health_port
    assert elsewhere.environment[HEALTH_PORT] == str(elsewhere.health_port)
