"""What the items of a loop came to is the same when it is read from an archive."""

from pathlib import Path
from typing import NamedTuple

import pytest

from noetl_compactor.archive import archive_past
from noetl_core.blob.file_place import FilePlace
from noetl_core.blob.history import History
from noetl_core.domain.envelope import Reference
from noetl_core.domain.ids import RefId
from noetl_core.store.loop_result import Ended, Weight
from noetl_core.store.postgres import Pool, open_pool
from services.compactor.old_log import a_week, an_execution, rules
from support.loop_log import LoopLog


class Seen(NamedTuple):
    items: list[Ended]
    in_pages: list[Ended]
    last_index: int
    weight: Weight


@pytest.fixture
async def log(pool: Pool) -> LoopLog:
    """Of an execution that ended long ago."""
    await a_week(pool)
    execution = await an_execution(pool, 1)
    return LoopLog(pool, execution, first_id=execution + 1000)


async def seen(log: LoopLog, history: History) -> Seen:
    loop = (log.pool, log.execution_id, [log.loop_id])
    pages = [page async for page in history.pages_of_loop(*loop, stop=10, size=2)]
    return Seen(
        await history.of_loop(*loop),
        [item for page in pages for item in page],
        await history.last_index(*loop),
        await history.weight(*loop),
    )


async def test_items_that_returned_nothing_stand_in_an_archive_as_in_the_log(
    log: LoopLog, database: str, tmp_path: Path
) -> None:
    of_child = Reference(ref_id=RefId(77), type="eventlog", bytes=5, execution_id=log.execution_id)
    await log.started(5)
    await log.done(0)
    await log.done(1, "own")
    await log.done(2, reference=of_child)
    await log.failed(3)
    await log.done(4, frame_rows=0)
    place = FilePlace(tmp_path)
    before = await seen(log, History(place))

    await archive(log, database, place)

    assert [item.is_done for item in before.items] == [True, True, True, False, True]
    assert await seen(log, History(place)) == before


async def archive(log: LoopLog, database: str, place: FilePlace) -> None:
    await log.pool.execute("UPDATE noetl.execution SET last_projected_event_id = 2 ^ 62")
    async with open_pool(database, role="noetl_compactor", size_max=2) as pool:
        assert await archive_past(pool, rules(place)) > 0
