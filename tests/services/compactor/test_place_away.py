"""The place of archives is away: nothing is dropped, it is said, and a later turn goes on."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import httpx
import pytest
from structlog.testing import CapturingLogger

from noetl_compactor import archive
from noetl_compactor.archive import Step, archive_past
from noetl_core.blob.file_place import FilePlace
from noetl_core.store.postgres import Pool
from support.postgres import free_port
from support.s3 import SECRET_KEY, Gate, Mood, open_s3_place

from .archived import assert_archived_once
from .old_log import (
    EVENTS,
    EXECUTIONS,
    WEEK,
    a_week,
    an_execution,
    an_old_log,
    rows_of,
    rules,
    tables,
)

TIMEOUT_SECONDS = 8.0
NEEDS_NOTHING_MORE = {"checked", "dropped"}
"""After these lines the place is not asked any more."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> CapturingLogger:
    """What the turns log, whatever other tests did to the log."""
    logger = CapturingLogger()
    monkeypatch.setattr(archive, "log", logger)
    return logger


class Spoiler:
    """Shuts the gate after a line of the protocol, the first time it comes to it."""

    def __init__(self, gate: Gate, step: Step, mood: Mood) -> None:
        self._gate, self._step, self._mood = gate, step, mood
        self._is_done = False

    def __call__(self, step: Step) -> None:
        if step == self._step and not self._is_done:
            self._is_done = True
            self._gate.spoil(self._mood)


@pytest.mark.slow
@pytest.mark.parametrize("step", get_args(Step))
async def test_an_s3_that_goes_away_after_any_line_loses_nothing(
    pool: Pool,
    compactor_pool: Pool,
    gate: Gate,
    s3_location: str,
    step: Step,
    said: CapturingLogger,
) -> None:
    before = await an_old_log(pool)
    mood: Mood = ("shut", "failing", "silent")[get_args(Step).index(step) % 3]
    async with open_s3_place(gate.url, s3_location, timeout_seconds=TIMEOUT_SECONDS) as place:
        gone = await archive_past(compactor_pool, rules(place, after=Spoiler(gate, step, mood)))

        if step in NEEDS_NOTHING_MORE:
            assert gone == EXECUTIONS * len(EVENTS)
        else:
            assert gone == 0
            assert await rows_of(pool, "event") == before["event"]
            assert ("archive.place_away",) in [call.args for call in said.calls]
            assert await archive_past(compactor_pool, rules(place)) == 0
            assert await rows_of(pool, "event") == before["event"]
        await gate.become("open")
        await archive_past(compactor_pool, rules(place))

        await assert_archived_once(pool, place, before)


async def test_a_check_that_gets_no_answer_does_not_throw_the_archive_away(
    pool: Pool, compactor_pool: Pool, gate: Gate, s3_location: str
) -> None:
    await an_old_log(pool)
    async with open_s3_place(gate.url, s3_location, timeout_seconds=TIMEOUT_SECONDS) as place:
        spoiler = Spoiler(gate, "published", "shut")
        await archive_past(compactor_pool, rules(place, after=spoiler))
        recorded = await pool.fetchval("SELECT meta ->> 'name' FROM noetl.manifest")
        await gate.become("open")

        await archive_past(compactor_pool, rules(place))

    assert await pool.fetchval("SELECT meta ->> 'name' FROM noetl.manifest") == recorded


async def test_a_directory_that_cannot_be_written_drops_nothing(
    pool: Pool, compactor_pool: Pool, tmp_path: Path, said: CapturingLogger
) -> None:
    before = await an_old_log(pool)
    (tmp_path / "archive").write_text("no directory")
    place = FilePlace(tmp_path / "archive")

    assert await archive_past(compactor_pool, rules(place)) == 0

    assert [call.args for call in said.calls] == [("archive.place_away",)]
    assert await rows_of(pool, "event") == before["event"]


@pytest.fixture
async def compactor(
    database: str, gate: Gate, s3_environment: dict[str, str], s3_location: str, tmp_path: Path
) -> AsyncIterator[str]:
    """A compactor with a short interval, as a process of its own; the URL of its health server."""
    port = free_port()
    environ = {
        **os.environ,
        **s3_environment,
        "NOETL_S3_ENDPOINT": gate.url,
        "NOETL_S3_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS),
        "NOETL_POSTGRES_DSN": database,
        "NOETL_ARCHIVE_DIR": s3_location,
        "NOETL_COMPACTOR_ENABLED": "true",
        "NOETL_COMPACTOR_INTERVAL_SECONDS": "0.2",
        "NOETL_HEALTH_PORT": str(port),
        "NOETL_LOG_LEVEL": "debug",
    }
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "noetl_compactor"), env=environ, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert await process.wait() == 0


@pytest.mark.slow
async def test_a_compactor_without_its_s3_says_so_counts_it_and_goes_on_when_it_is_back(
    pool: Pool, gate: Gate, compactor: str, tmp_path: Path
) -> None:
    gate.spoil("shut")
    await a_week(pool)
    await an_execution(pool, 1)
    async with asyncio.timeout(120), httpx.AsyncClient(timeout=30) as client:
        while not await _turns_away(client, compactor):  # noqa: ASYNC110 - another process acts
            await asyncio.sleep(0.1)
        assert len(await rows_of(pool, "event")) == len(EVENTS)
        await gate.become("open")
        while f"event_{WEEK}" in await tables(pool):  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.1)

    assert await rows_of(pool, "event") == []
    log = (tmp_path / "log").read_text()
    assert "archive.place_away" in log
    assert SECRET_KEY not in log


async def _turns_away(client: httpx.AsyncClient, url: str) -> float:
    try:
        text = (await client.get(f"{url}/metrics")).text
    except httpx.TransportError:
        return 0
    found = re.search(r"^noetl_compactor_place_away_total(?:\{\})? (\S+)$", text, re.MULTILINE)
    return 0 if found is None else float(found[1])
