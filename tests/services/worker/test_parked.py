"""Tools that wait: what the worker finds out, and that it waits for nothing itself."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from noetl_core.blob import ResultStore, document_of
from noetl_core.domain.brief import Element
from noetl_core.domain.ids import CatalogId, LoopId
from noetl_core.process.clock import unix_ms
from noetl_core.process.secrets import generate_key
from noetl_core.store import credential
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, Parked
from noetl_worker import held
from noetl_worker.plan import Plans
from noetl_worker.tools.approval import ApprovalTool
from noetl_worker.tools.playbook import PlaybookTool
from noetl_worker.tools.tool import ToolParked
from noetl_worker.tools.wait import WaitTool
from services.worker import calls
from services.worker.bench import Bench
from services.worker.desk import (
    all_confirmed,
    config,
    eventually,
    issue,
    listening,
    playbook,
    register,
    remove,
    working,
)

CHILD = playbook("- step: first\n  tool: {kind: noop}\n- step: last\n  tool: {kind: noop}")
HOUR_MS = 3600_000
SLACK_MS = 20_000


@pytest.fixture
def bench(pool: Pool) -> Bench:
    made = Bench(pool, generate_key())
    for tool in (PlaybookTool(pool, Plans(pool)), WaitTool(), ApprovalTool()):
        made.tools[tool.kind] = tool
    return made


async def test_a_playbook_is_parked_with_its_child_and_its_payload(bench: Bench) -> None:
    await register(bench.pool, CHILD, catalog_id=2)

    parked = await bench.parked(
        """
- step: a
  input: {shared: 1, over: 1}
  tool:
    kind: playbook
    path: test/2
    return_step: last
    timeout: 1h
    input: {over: 2, ids: "{{ [1, 2] }}"}
"""
    )

    assert (parked.kind, parked.catalog_id, parked.version) == ("playbook", 2, 1)
    assert (parked.path, parked.return_step) == ("test/2", "last")
    assert parked.payload is not None
    assert document_of(parked.payload) == {"shared": 1, "over": 2, "ids": [1, 2]}
    assert parked.until_ms is not None
    assert 0 < parked.until_ms - unix_ms() <= HOUR_MS


async def test_a_child_is_the_newest_version_unless_one_is_named(bench: Bench) -> None:
    for version in (1, 2):
        await bench.pool.execute(
            "INSERT INTO noetl.catalog (catalog_id, path, version, content, sha256)"
            " VALUES ($1, 'sub', $2, $3, '')",
            50 + version,
            version,
            CHILD,
        )

    async def found(more: str) -> CatalogId | None:
        tool = f"{{kind: playbook, path: sub{more}}}"
        return (await bench.parked(f"- step: a\n  tool: {tool}")).catalog_id

    assert await found("") == await found(", version: latest") == 52
    assert await found(", version: 1") == await found(", version: '{{ 0 + 1 }}'") == 51


async def test_a_child_that_is_not_registered_says_how_to_register_it(bench: Bench) -> None:
    error = await bench.error("- step: a\n  tool: {kind: playbook, path: no/where, version: 3}")

    assert (error.kind, error.code) == ("not_found", "NO_PLAYBOOK")
    assert "version 3 of 'no/where'" in error.message
    assert "noetl register" in error.message


async def test_a_return_step_that_the_child_has_not_names_those_it_has(bench: Bench) -> None:
    await register(bench.pool, CHILD, catalog_id=2)

    error = await bench.error(
        "- step: a\n  tool: {kind: playbook, path: test/2, return_step: missing}"
    )

    assert error.kind == "client_error"
    assert "first, last" in error.message


async def test_a_large_payload_goes_to_the_tier(bench: Bench, tmp_path: Path) -> None:
    await register(bench.pool, CHILD, catalog_id=2)
    bench.results = ResultStore(store_dir=str(tmp_path))

    parked = await bench.parked(
        "- step: a\n  tool: {kind: playbook, path: test/2, input: {x: \"{{ 'y' * 100000 }}\"}}"
    )

    assert parked.payload is not None
    assert (parked.payload.tier, parked.payload.inline) == ("pvc", None)


@pytest.mark.parametrize(
    ("value", "iterator"),
    [
        ({"id": 7}, {"row": {"id": 7}, "index": 3, "first": False, "last": True}),
        ("x" * 5000, {"index": 3, "first": False, "last": True}),
    ],
    ids=["small", "large"],
)
async def test_a_child_knows_the_iteration_that_calls_it(
    bench: Bench, value: Any, iterator: dict[str, Any]
) -> None:
    await register(bench.pool, CHILD, catalog_id=2)

    parked = await bench.parked(
        "- step: a\n  loop: {in: [], iterator: row}\n  tool: {kind: playbook, path: test/2}",
        element=Element(index=3, total=4, loop_id=LoopId(1), part=0, offset=3, value=value),
        iter_parent={"index": 1},
    )

    assert parked.iterator == {**iterator, "parent": {"index": 1}}


@pytest.mark.parametrize(("seconds", "ms"), [(90, 90_000), ("5m", 300_000), ("1h", HOUR_MS)])
async def test_a_wait_for_a_while_says_when_it_is_over(seconds: Any, ms: int) -> None:
    parked = await calls.parked(WaitTool(), config={"seconds": seconds})

    assert parked.until_ms is not None
    assert ms - SLACK_MS < parked.until_ms - unix_ms() <= ms


async def test_a_wait_until_a_moment_reads_its_zone_and_takes_none_for_utc() -> None:
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=3)
    there = (soon + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%S+02:00")

    zoned = await calls.parked(WaitTool(), config={"until": there})
    naive = await calls.parked(WaitTool(), config={"until": soon.strftime("%Y-%m-%dT%H:%M:%S")})

    assert zoned.until_ms == naive.until_ms == soon.timestamp() * 1000


async def test_a_wait_that_is_over_returns_at_once(bench: Bench) -> None:
    past = await bench.run("- step: a\n  tool: {kind: wait, until: '2020-01-01T00:00:00Z'}")
    none = await bench.run("- step: a\n  tool: {kind: wait, seconds: 0}")

    assert isinstance(past, Done)
    assert isinstance(none, Done)
    assert past.stored is None


async def test_a_wait_for_a_signal_waits_as_long_as_its_timeout(bench: Bench) -> None:
    bounded = await bench.parked("- step: a\n  tool: {kind: wait, signal: paid, timeout: 1h}")
    forever = await bench.parked("- step: a\n  tool: {kind: wait, signal: paid}")

    assert (bounded.kind, bounded.signal, forever.signal) == ("wait", "paid", "paid")
    assert bounded.until_ms is not None
    assert 0 < bounded.until_ms - unix_ms() <= HOUR_MS
    assert forever.until_ms is None


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": -1},
        {"seconds": "soon"},
        {"seconds": 1e12},
        {"until": "tomorrow"},
        {"until": 5},
        {"until": "9999-01-01"},
        {"signal": ""},
        {"signal": 3},
        {},
    ],
    ids=str,
)
async def test_a_wait_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    error = await calls.error(WaitTool(), config=fields)

    assert (error.kind, error.code) == ("client_error", "WRONG_FIELD")


async def test_an_approval_waits_for_a_signal_with_the_name_of_its_step(bench: Bench) -> None:
    parked = await bench.parked(
        """
- step: a
  tool:
    kind: approval
    message: "Pay {{ 40 + 2 }}?"
    approvers: [ann, bob]
    form: {amount: {type: number}}
    timeout: 1h
"""
    )

    assert (parked.kind, parked.signal) == ("approval", "a")
    assert parked.details == {
        "message": "Pay 42?",
        "approvers": ["ann", "bob"],
        "form": {"amount": {"type": "number"}},
    }
    assert parked.until_ms is not None


async def test_a_question_shows_no_credential(bench: Bench) -> None:
    sealed = bench.keyring.encrypt("api", {"token": "hunter2-token"})
    await credential.upsert(bench.pool, "api", kind="bearer", sealed=sealed)

    parked = await bench.parked(
        "- step: a\n  tool: {kind: approval, message: 'with {{ keychain.api.token }}'}"
    )

    assert parked.details["message"] == "with ***"


@pytest.mark.parametrize(
    "fields", [{"approvers": [1]}, {"approvers": {}}, {"form": [1]}, {"message": "x" * 9000}]
)
async def test_an_approval_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    assert (await calls.error(ApprovalTool(), config=fields)).code == "WRONG_FIELD"


async def test_only_a_kind_that_waits_may_wait(bench: Bench) -> None:
    bench.answers(ToolParked(until_ms=1))

    error = await bench.error("- step: a\n  tool: {kind: noop}")

    assert error.kind == "internal"
    assert "wait" in error.message


async def test_a_parked_command_frees_its_slot_and_is_said_once(
    database: str, pool: Pool, nats_url: str
) -> None:
    text = playbook("- step: a\n  tool: {kind: wait, seconds: 1h}")
    catalog_id = await register(pool, text)
    one_slot = config(database, nats_url, worker_slots=1)

    async with listening(nats_url, pool) as ear, working(one_slot):
        keys = [await issue(pool, catalog_id, "a", index=n, element=n) for n in range(3)]
        await eventually(lambda: len(ear.parked) == 3)
        await asyncio.sleep(0.5)

    assert [m.command_id for m in ear.parked] == [key[1] for key in keys]
    assert ear.ends == []


async def test_a_parked_command_is_said_again_until_its_row_is_gone(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "REPUBLISH_SECONDS_MIN", 0.1)
    catalog_id = await register(pool, playbook("- step: a\n  tool: {kind: wait, signal: go}"))

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        ear.confirms = False
        key = await issue(pool, catalog_id, "a")
        await eventually(lambda: len(ear.parked) >= 2)
        await remove(pool, key)
        await all_confirmed()
        await asyncio.sleep(0.6)
        said = len(ear.parked)
        await asyncio.sleep(0.6)

    assert len(ear.parked) == said
    assert len({msgspec.json.encode(m) for m in ear.parked}) == 1
    assert isinstance(ear.parked[0], Parked)
