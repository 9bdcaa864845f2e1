"""What the shard-manager shows: what whoever leads has seen, and of nobody else."""

from collections.abc import Callable, Iterable, Iterator

import pytest
from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.domain.ids import RuntimeId, ShardId
from noetl_core.process.service import Service, serving
from noetl_core.store import leader
from noetl_core.store.postgres import Pool
from noetl_core.wire.topology import RuntimeMember, ShardOwnership, Topology
from noetl_shard_manager import metrics
from noetl_shard_manager.config import ShardManagerConfig
from noetl_shard_manager.main import start


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    metrics.show_nothing()
    yield
    metrics.show_nothing()


def values(
    gauge: Callable[[CallbackOptions], Iterable[Observation]],
) -> dict[tuple[object, ...], float]:
    found = gauge(CallbackOptions())
    return {tuple((one.attributes or {}).values()): one.value for one in found}


def seen(*, owner: str | None, status: str) -> Topology:
    return Topology(
        shard_count=1,
        shards=(ShardOwnership(role="broker", shard_id=ShardId(0), epoch=1, instance=owner),),
        members=(RuntimeMember(kind="broker", name="a", status=status),),
    )


def test_what_is_not_there_any_more_shows_a_zero() -> None:
    metrics.show(seen(owner=None, status="online"))
    metrics.show(seen(owner="a", status="offline"))

    assert values(metrics._without_owner) == {("broker",): 0}
    assert values(metrics._registered) == {("broker", "online"): 0, ("broker", "offline"): 1}


async def test_who_does_not_lead_any_more_shows_nothing(
    pool: Pool, database: str, nats_url: str
) -> None:
    metrics.show(seen(owner=None, status="online"))
    await leader.acquire(pool, "shard-manager", RuntimeId(99), lease_seconds=60)
    config = ShardManagerConfig(postgres_dsn=database, nats_url=nats_url)

    async with serving(Service("shard-manager", config), start):
        pass  # each loop has its first turn

    assert values(metrics._without_owner) == values(metrics._registered) == {}
