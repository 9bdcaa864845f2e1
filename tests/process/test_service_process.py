"""The life of a service, seen from outside: real processes, real signals, real HTTP."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from support.postgres import free_port

PROGRAM = Path(__file__).parent / "program.py"
ENVIRON = {"NOETL_POSTGRES_DSN": "postgresql://nowhere", "NOETL_INSTANCE": "sample-1"}
SECONDS_MAX = 60


@asynccontextmanager
async def program(what: str, environ: Mapping[str, str] = ENVIRON) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), what, stdout=PIPE, stderr=PIPE, env=dict(environ)
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def told(process: Process, line: str) -> None:
    assert process.stdout
    while (await asyncio.wait_for(process.stdout.readline(), SECONDS_MAX)).decode().strip() != line:
        assert not process.stdout.at_eof(), f"{line!r} was never told"


async def end_of(process: Process) -> tuple[list[str], str]:
    out, err = await asyncio.wait_for(process.communicate(), SECONDS_MAX)
    return out.decode().splitlines(), err.decode()


async def get(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), SECONDS_MAX)).decode()
    writer.close()
    return int(answer.split(" ")[1]), answer.partition("\r\n\r\n")[2]


async def eventually(port: int, status: int) -> None:
    """Whether it is ready, says the service."""
    async with asyncio.timeout(SECONDS_MAX):
        while True:
            try:
                if (await get(port, "/ready"))[0] == status:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.05)


async def test_sigterm_lets_the_turn_end_then_releases_then_closes_and_exits_0() -> None:
    async with program("patient") as process:
        await told(process, "turn begins")
        process.send_signal(signal.SIGTERM)
        out, _ = await end_of(process)

    assert out == ["turn ends", "release", "close bus", "close pool"]
    assert process.returncode == 0


async def test_sigint_ends_a_service_the_same_way() -> None:
    async with program("patient") as process:
        await told(process, "turn ends")
        process.send_signal(signal.SIGINT)
        out, _ = await end_of(process)

    assert out == ["release", "close bus", "close pool"]
    assert process.returncode == 0


async def test_sigterm_in_the_middle_of_start_closes_what_was_opened() -> None:
    async with program("slow") as process:
        await told(process, "starting")
        process.send_signal(signal.SIGTERM)
        out, _ = await end_of(process)

    assert out == ["close pool"]
    assert process.returncode == 0


async def test_a_task_that_dies_ends_the_process_with_its_traceback() -> None:
    async with program("mortal") as process:
        out, err = await end_of(process)

    assert process.returncode == 1
    assert "ZeroDivisionError: the loop has a bug" in err
    assert "Traceback" in err
    assert out == ["open mortal", "close mortal"]


async def test_a_start_that_fails_ends_the_process_with_its_traceback() -> None:
    async with program("broken") as process:
        out, err = await end_of(process)

    assert process.returncode == 1
    assert "LookupError: start has a bug" in err
    assert out == ["open pool", "close pool"]


async def test_the_death_of_one_service_ends_the_others_in_its_process_in_order() -> None:
    async with program("both") as process:
        out, err = await end_of(process)

    assert process.returncode == 1
    assert "ZeroDivisionError" in err
    assert out[-4:] == ["turn ends", "release", "close bus", "close pool"]


async def test_a_wrong_value_exits_and_names_itself() -> None:
    async with program("patient", ENVIRON | {"NOETL_HEALTH_PORT": "many"}) as process:
        _, err = await end_of(process)

    assert process.returncode == 2
    assert "NOETL_HEALTH_PORT='many'" in err
    assert "Traceback" not in err


async def test_a_service_is_ready_after_start_and_not_once_it_is_stopping() -> None:
    port = free_port()
    async with program("very patient", ENVIRON | {"NOETL_HEALTH_PORT": str(port)}) as process:
        await eventually(port, 200)
        alive, _ = await get(port, "/health")
        missing, _ = await get(port, "/nothing")
        process.send_signal(signal.SIGTERM)
        await eventually(port, 503)

    assert (alive, missing) == (200, 404)


async def test_metrics_are_read_under_the_names_they_were_declared_with() -> None:
    port = free_port()
    async with program("patient", ENVIRON | {"NOETL_HEALTH_PORT": str(port)}):
        await eventually(port, 200)
        status, text = await get(port, "/metrics")

    assert status == 200
    assert 'noetl_sample_age_ms{shard="3"} 7.0' in text
    assert 'noetl_sample_turn_seconds_bucket{le="0.05"} 1.0' in text
    assert 'noetl_sample_turn_seconds_bucket{le="0.025"} 0.0' in text
    assert "process_cpu_seconds_total" in text


async def test_a_log_line_is_json_with_the_service_and_ids_as_text() -> None:
    async with program("patient") as process:
        await told(process, "turn begins")
        process.send_signal(signal.SIGTERM)
        _, err = await end_of(process)

    lines = [json.loads(line) for line in err.splitlines()]
    started = next(line for line in lines if line["event"] == "sample.started")
    assert started["service"] == "patient"
    assert started["execution_id"] == str(2**60)
    assert started["level"] == "info"
