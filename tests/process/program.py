"""Small processes for test_service_process.py: `python program.py <what>`; they tell on stdout."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import structlog

from noetl_core.process.config import Config
from noetl_core.process.service import Part, Service, run_service, run_services
from noetl_core.process.telemetry import meter

log = structlog.get_logger()

# Declared before telemetry is set up, as a service does it in its metrics.py.
AGE_MS = meter("sample").create_gauge("noetl_sample_age_ms", unit="ms", description="Sample.")
TURN_SECONDS = meter("sample").create_histogram(
    "noetl_sample_turn_seconds", unit="s", description="Sample."
)


def tell(line: str) -> None:
    print(line, flush=True)


@asynccontextmanager
async def resource(name: str) -> AsyncIterator[str]:
    tell(f"open {name}")
    yield name
    tell(f"close {name}")


async def say(line: str) -> None:
    tell(line)


async def start_patient(service: Service[Config], seconds: float = 0.5) -> None:
    """A turn that takes a while: SIGTERM must wait for its end."""
    await service.open(resource("pool"))
    await service.open(resource("bus"))

    async def turn() -> None:
        tell("turn begins")
        await asyncio.sleep(seconds)
        tell("turn ends")

    async def release() -> None:
        tell("release")

    service.on_stop(release)
    service.every(60, turn)
    AGE_MS.set(7, {"shard": 3})
    TURN_SECONDS.record(0.03)
    log.info("sample.started", execution_id=2**60)


async def start_slowly(service: Service[Config]) -> None:
    await service.open(resource("pool"))
    tell("starting")
    await asyncio.sleep(60)


async def start_mortal(service: Service[Config]) -> None:
    await service.open(resource("mortal"))

    async def turn() -> None:
        raise ZeroDivisionError("the loop has a bug")

    service.every(1, turn)


async def start_broken(service: Service[Config]) -> None:
    await service.open(resource("pool"))
    raise LookupError("start has a bug")


def main() -> None:
    match sys.argv[1]:
        case "patient":
            run_service("patient", Config, start_patient)
        case "very patient":
            run_service("patient", Config, partial(start_patient, seconds=30))
        case "slow":
            run_service("slow", Config, start_slowly)
        case "mortal":
            run_service("mortal", Config, start_mortal)
        case "broken":
            run_service("broken", Config, start_broken)
        case "both":
            patient = Part("patient", Config, start_patient)
            mortal = Part("mortal", Config, start_mortal)
            run_services([patient, mortal])


if __name__ == "__main__":
    main()
