"""All services but the worker, in one process and one event loop."""

from importlib import import_module

from noetl_cli.stack.services import ENGINE_SERVICES, module_of
from noetl_core.process.service import run_services


def main() -> None:
    run_services([import_module(f"{module_of(name)}.main").SERVICE for name in ENGINE_SERVICES])


if __name__ == "__main__":
    main()
