"""GET /api/shards and the wish for another number of them."""

from noetl_core.domain.ids import RuntimeId, ShardId
from noetl_core.store import execution_shard, inbox, resize
from noetl_core.store.postgres import Pool
from services.api_gateway.conftest import Client


async def test_every_shard_is_shown_with_its_owner_its_lease_and_what_waits(
    client: Client, pool: Pool
) -> None:
    await execution_shard.claim(
        pool, "broker", RuntimeId(1), instance="b", lease_seconds=30, limit=1
    )
    await inbox.put(pool, ShardId(0), b"x")

    found = (await client.get("/api/shards")).json()

    assert found["count"] == 16
    assert found["resize"] is None
    assert len(found["shards"]) == 32
    first, second = found["shards"][:2]
    assert (first["role"], first["instance"], first["epoch"], first["waiting"]) == (
        *("broker", "b"),
        *(1, 1),
    )
    assert first["leased_until"] is not None
    assert (second["instance"], second["leased_until"], second["waiting"]) == (None, None, 0)


async def test_the_lag_of_a_projection_is_that_of_now(client: Client, pool: Pool) -> None:
    await pool.execute(
        "INSERT INTO noetl.event"
        " (execution_id, event_id, event_key, shard_id, event_type, created_at)"
        " VALUES (1, 9, 'k', 3, 'step.enter', now() - interval '1 hour')"
    )
    sql = "INSERT INTO noetl.projection_checkpoint VALUES ($1, $2, now(), 60000)"
    await pool.executemany(sql, [(3, 8), (4, 8)])

    found = (await client.get("/api/shards")).json()["shards"]

    lags = {one["shard_id"]: one["lag_ms"] for one in found if one["role"] == "projection"}
    assert 3_590_000 < lags[3] < 3_700_000
    assert lags[4] == 0


async def test_a_wish_is_stored_for_the_shard_manager(client: Client, pool: Pool) -> None:
    answer = await client.post("/api/shards/resize", json={"from": 16, "to": 64})

    assert answer.status_code == 202
    assert (answer.json()["resize"]["from"], answer.json()["resize"]["to"]) == (16, 64)
    assert (await resize.open_wish(pool)) is not None
    assert answer.json()["count"] == 16, "nothing has changed yet"


async def test_a_wish_that_cannot_be_granted_says_what_to_do(client: Client) -> None:
    wrong = await client.post("/api/shards/resize", json={"from": 8, "to": 64})
    same = await client.post("/api/shards/resize", json={"from": 16, "to": 16})
    large = await client.post("/api/shards/resize", json={"from": 16, "to": 2000})
    await client.post("/api/shards/resize", json={"from": 16, "to": 64})
    second = await client.post("/api/shards/resize", json={"from": 16, "to": 32})

    assert [one.status_code for one in (wrong, same, large, second)] == [409, 422, 422, 409]
    assert "there are 16 shards, not 8" in wrong.json()["detail"]
    assert "still under way" in second.json()["detail"]
