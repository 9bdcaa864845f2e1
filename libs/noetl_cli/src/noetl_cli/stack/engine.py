"""All services but the worker, in one process and one event loop."""

from importlib import import_module

from noetl_cli.stack.services import ENGINE_SERVICES, main_of
from noetl_core.process.service import run_services

_PARTS = [import_module(main_of(name)).SERVICE for name in ENGINE_SERVICES]


def main() -> None:
    run_services(_PARTS)
