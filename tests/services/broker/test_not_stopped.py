"""One bad execution, message or volume never stops a shard: the rest of the batch goes on."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from noetl_broker.advance import Broker
from noetl_broker.turn import Letter
from noetl_core.blob import result_store
from noetl_core.blob.result_store import DB_BYTES_MAX, ResultStore
from noetl_core.domain.ids import CommandId, EpochId, ExecutionId, WorkerId
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import (
    Barrier,
    Cancel,
    Claimed,
    Message,
    Reconcile,
    Start,
    encode_messages,
)
from services.broker.desk import Desk, claimed, done, letter_of
from services.broker.test_advance import CHAIN, LOOP


@pytest.fixture
async def desk(pool: Pool) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    return desk


async def two(desk: Desk) -> tuple[ExecutionId, ExecutionId, Mapping[ExecutionId, CommandId]]:
    """Two executions, each with an open command."""
    good, bad = await desk.start(CHAIN), await desk.start(CHAIN)
    return good, bad, {one.execution_id: one.command_id for one in await desk.lease()}


async def ends(
    desk: Desk, good: ExecutionId, bad: ExecutionId, open_: Mapping[ExecutionId, CommandId]
) -> None:
    """The reports of both in one batch."""
    value = {"go": False}
    reports = [letter_of(done(one, open_[one], value)) for one in (bad, good)]
    await desk.broker.advance(reports)


async def letters_kept(desk: Desk, execution_id: ExecutionId | None) -> int:
    sql = "SELECT count(*) FROM noetl.dead_letter WHERE execution_id IS NOT DISTINCT FROM $1"
    return int(await desk.pool.fetchval(sql, execution_id))


UNKNOWN_EVENT = """
INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)
SELECT execution_id, $2, 'future', shard_id, 'step.newfangled'
FROM noetl.event WHERE execution_id = $1 LIMIT 1
"""

UNREADABLE_ROW = """
INSERT INTO noetl.execution (
    execution_id, catalog_id, path, version, shard_id, status, state, ctx, progress,
    last_event_type, last_projected_event_id, started_at, updated_at
)
VALUES ($1, 1, 'p', 1, 0, 'RUNNING', '{"status": "SUSPENDED"}', '{}', '{}', 't', 1, now(), now())
"""


async def test_a_log_that_cannot_be_read_is_set_aside_and_the_others_go_on(desk: Desk) -> None:
    good, bad, open_ = await two(desk)
    await desk.pool.execute(UNKNOWN_EVENT, bad, desk.mint())
    desk.states.drop([bad])

    await ends(desk, good, bad, open_)

    assert "execution.completed" in await desk.types(good)
    assert (await desk.types(bad))[-1] == "step.newfangled"
    assert await letters_kept(desk, bad) == 1


async def test_who_is_not_understood_is_kept_once_however_often_it_is_said(desk: Desk) -> None:
    good, bad, open_ = await two(desk)
    await desk.pool.execute(UNKNOWN_EVENT, bad, desk.mint())
    desk.states.drop([bad])

    for _ in range(3):
        await ends(desk, good, bad, open_)

    assert await letters_kept(desk, bad) == 1


async def test_a_snapshot_that_cannot_be_read_is_made_up_for_by_the_log(desk: Desk) -> None:
    good, bad, open_ = await two(desk)
    await desk.pool.execute(UNREADABLE_ROW, bad)
    desk.states.drop([bad])

    await ends(desk, good, bad, open_)

    for execution_id in (good, bad):
        assert "execution.completed" in await desk.types(execution_id)


async def test_a_barrier_passes_over_a_log_that_cannot_be_read(desk: Desk) -> None:
    good, bad, _ = await two(desk)
    await desk.pool.execute(UNKNOWN_EVENT, bad, desk.mint())
    desk.states.drop([bad])

    await barrier(desk)

    assert (await desk.types(good))[-1] == "checkpoint.committed"
    assert (await desk.types(bad))[-1] == "step.newfangled"


async def barrier(desk: Desk) -> None:
    epoch = EpochId(desk.mint())
    letters = [Letter(s, encode_messages([Barrier(shard_id=s, epoch=epoch)])) for s in desk.claims]
    await desk.broker.advance(letters)


NO_SUCH_NAMES = [
    Cancel(execution_id=ExecutionId(2**63 + 5)),
    Claimed(
        execution_id=ExecutionId(5), command_id=CommandId("a\x00"), worker_id=WorkerId("worker")
    ),
    Claimed(execution_id=ExecutionId(5), command_id=CommandId("a.1#1"), worker_id=WorkerId("x\ty")),
]


@pytest.mark.parametrize("message", NO_SUCH_NAMES, ids=["id", "command", "worker"])
async def test_a_message_that_no_row_could_hold_is_set_aside(desk: Desk, message: Message) -> None:
    good = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    shard = letter_of(done(good, leased.command_id, None)).shard_id

    await desk.broker.advance(
        [
            Letter(shard, encode_messages([message])),
            letter_of(done(good, leased.command_id, {"go": False})),
        ]
    )

    assert "execution.completed" in await desk.types(good)
    assert await letters_kept(desk, None) == 1


ABYSS = b"\x81\xa1a" * 5000 + b"\x01"
CANCELLED_BY = b"\x91\x83\xa4type\xa6cancel\xacexecution_id\x01\xa6reason"
DONE_OF = b"\x91\x83\xa4type\xa4done\xacexecution_id\x01\xa7context"


@pytest.mark.parametrize(
    "body",
    [CANCELLED_BY + b"\xa1\xff", DONE_OF + ABYSS, b"\xc1", b"", b"\x91\xa2\xff\xfe"],
    ids=["no text", "too deep", "no msgpack", "nothing", "no message"],
)
async def test_a_letter_that_cannot_be_read_is_set_aside(desk: Desk, body: bytes) -> None:
    good = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    report = letter_of(done(good, leased.command_id, {"go": False}))

    await desk.broker.advance([Letter(report.shard_id, body), report])

    assert "execution.completed" in await desk.types(good)
    assert await letters_kept(desk, None) == 1


@pytest.mark.parametrize("db_bytes_max", [DB_BYTES_MAX, 100_000], ids=["small", "large"])
async def test_a_volume_that_cannot_be_written_fails_whoever_has_no_other_place_alone(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db_bytes_max: int
) -> None:
    monkeypatch.setattr(result_store, "DB_BYTES_MAX", db_bytes_max)
    (tmp_path / "file").write_text("")
    store = ResultStore(store_dir=str(tmp_path / "file" / "below"))
    desk.broker = Broker(desk.pool, store, desk.states, held=lambda: desk.claims, mint=desk.mint)
    good = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    bad = ExecutionId(desk.mint())
    content = LOOP.replace("[a, b, c, d, e]", str(["x" * 40_000] * 8))
    start = Start(execution_id=bad, catalog_id=await desk.register(content), path="p", version=1)

    report = letter_of(done(good, leased.command_id, {"go": False}))
    await desk.broker.advance([letter_of(start), report])

    assert "execution.completed" in await desk.types(good)
    is_kept = db_bytes_max == DB_BYTES_MAX
    assert ((await desk.types(bad))[-1] == "execution.failed") is not is_kept
    assert await letters_kept(desk, bad) == (0 if is_kept else 1)


async def test_what_the_database_refuses_is_found_one_by_one_and_the_others_are_shown_in_traces(
    desk: Desk,
) -> None:
    await desk.pool.execute("ALTER TABLE noetl.event ADD CHECK (node_name <> 'refused')")
    good, bad = (ExecutionId(desk.mint()) for _ in range(2))
    letters = []
    for one, content in ((good, CHAIN), (bad, CHAIN.replace("first", "refused"))):
        catalog_id = await desk.register(content)
        start = Start(execution_id=one, catalog_id=catalog_id, path="p", version=1)
        letters.append(letter_of(start))

    turn = await desk.broker.advance(letters)

    assert (await desk.types(good))[-1] == "command.issued"
    assert (await desk.types(bad))[-1] == "execution.failed"
    assert await letters_kept(desk, bad) == 1
    shown = {row.event_id for row in [*turn.absorbed, *turn.batch.events]}
    assert shown == {r[0] for r in await desk.pool.fetch("SELECT event_id FROM noetl.event")}


async def test_nothing_is_left_to_mark_of_executions_that_have_ended(desk: Desk) -> None:
    """Without a barrier for days, the next one would otherwise read all of them."""
    desk.states._live._count_max = 10
    for _ in range(60):
        await desk.start(CHAIN)
    await desk.run({"first": {"go": False}})
    assert not any(desk.broker._unmarked.values())

    await barrier(desk)

    sql = "SELECT count(*) FROM noetl.event WHERE event_type = 'checkpoint.committed'"
    assert await desk.pool.fetchval(sql) == 0


async def test_a_lost_command_is_found_though_another_execution_issues_one_of_its_name(
    desk: Desk,
) -> None:
    lost = await desk.start(CHAIN)
    await desk.pool.execute("DELETE FROM noetl.command")
    other = Start(
        execution_id=ExecutionId(desk.mint()),
        catalog_id=await desk.register(CHAIN),
        path="p",
        version=1,
    )

    await desk.broker.advance([letter_of(other), letter_of(Reconcile(execution_id=lost))])

    leased = [one for one in await desk.lease() if one.execution_id == lost]
    assert [one.command_id for one in leased] == ["first.1#2"]


async def test_a_long_tail_is_replayed_page_by_page_to_its_end(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_broker.states.TAIL_PAGE", 3)
    first, second = await desk.start(LOOP), await desk.start(CHAIN)
    for one in await desk.lease():
        await desk.send(claimed(one.execution_id, one.command_id))
        if one.execution_id == first and not one.command_id.startswith("each.1/4"):
            await desk.send(done(one.execution_id, one.command_id, "x"))
    before = {e: desk.states.get(e).state for e in (first, second)}
    desk.states.drop([first, second])

    async with desk.pool.acquire() as conn:
        assert await desk.states.load(conn, [first, second]) == {}

    for execution_id, state in before.items():
        assert state.is_open
        assert desk.states.get(execution_id).state == state
