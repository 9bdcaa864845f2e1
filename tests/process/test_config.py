"""process/config.py: the environment becomes a struct, or names what is wrong with it."""

from typing import Annotated

import pytest
from msgspec import Meta

from noetl_compactor.config import CompactorConfig
from noetl_core.blob.s3 import S3Settings
from noetl_core.process.config import Config, ConfigError, StoreConfig, also, load_config
from noetl_core.process.ownership import ShardConfig
from noetl_core.process.stores import s3_settings
from noetl_worker.config import WorkerConfig

DSN = {"NOETL_POSTGRES_DSN": "postgresql://somewhere"}


class SampleConfig(Config, frozen=True, kw_only=True):
    batch_size: Annotated[int, Meta(gt=0)] = 500
    pause_seconds: float = 0.5
    is_eager: bool = False
    pools: tuple[str, ...] = ("cpu",)
    master_key: Annotated[str, Meta(min_length=8)] = "12345678"


def test_a_field_is_read_from_its_variable() -> None:
    environ = DSN | {
        "NOETL_BATCH_SIZE": "7",
        "NOETL_PAUSE_SECONDS": "1.5",
        "NOETL_IS_EAGER": "true",
        "NOETL_POOLS": "cpu, gpu",
    }

    config = load_config(SampleConfig, environ)

    assert config.batch_size == 7
    assert config.pause_seconds == 1.5
    assert config.is_eager
    assert config.pools == ("cpu", "gpu")
    assert config.nats_url == "nats://127.0.0.1:4222"


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="NOETL_POSTGRES_DSN is not set"):
        load_config(SampleConfig, {})


def test_an_empty_number_is_not_set() -> None:
    config = load_config(SampleConfig, DSN | {"NOETL_BATCH_SIZE": "", "NOETL_PAUSE_SECONDS": " "})

    assert (config.batch_size, config.pause_seconds) == (500, 0.5)


@pytest.mark.parametrize("value", ["", "0"])
def test_a_capacity_that_others_leave_open_is_ours(value: str) -> None:
    config = load_config(WorkerConfig, DSN | {"NOETL_WORKER_CAPACITY": value})

    assert config.worker_slots == WorkerConfig(postgres_dsn="").worker_slots


@pytest.mark.parametrize("value", ["0", "many", "1.5"])
def test_a_wrong_value_is_named_with_its_variable(value: str) -> None:
    with pytest.raises(ConfigError, match=f"NOETL_BATCH_SIZE='{value}': Expected `int`"):
        load_config(SampleConfig, DSN | {"NOETL_BATCH_SIZE": value})


def test_every_wrong_value_is_named_at_once() -> None:
    environ = {"NOETL_BATCH_SIZE": "0", "NOETL_LOG_LEVEL": "loud"}

    with pytest.raises(ConfigError) as caught:
        load_config(SampleConfig, environ)

    for variable in ("NOETL_POSTGRES_DSN", "NOETL_BATCH_SIZE", "NOETL_LOG_LEVEL"):
        assert variable in str(caught.value)


def test_a_wrong_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SampleConfig, DSN | {"NOETL_MASTER_KEY": "hunter2"})

    assert "NOETL_MASTER_KEY" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_heartbeat_that_comes_after_the_lease_is_refused() -> None:
    environ = DSN | {"NOETL_SHARD_LEASE_SECONDS": "5", "NOETL_SHARD_HEARTBEAT_SECONDS": "5"}

    with pytest.raises(ConfigError, match="NOETL_SHARD_HEARTBEAT_SECONDS=5 must be below"):
        load_config(ShardConfig, environ)


@pytest.mark.parametrize(
    ("lease", "heartbeat"), [(30, 10), (3, 1), (2, 1.9), (1.5, 0.4), (60, 0.1)]
)
def test_a_silent_owner_is_noticed_within_the_lease_and_a_live_one_misses_two_renewals(
    lease: float, heartbeat: float
) -> None:
    config = ShardConfig(
        postgres_dsn="", shard_lease_seconds=lease, shard_heartbeat_seconds=heartbeat
    )

    noticed = config.shard_held_seconds + config.shard_look_seconds
    assert noticed < lease
    assert 3 * config.shard_renew_seconds <= config.shard_held_seconds
    assert config.shard_look_seconds <= config.shard_renew_seconds <= heartbeat


class OldNameConfig(Config, frozen=True, kw_only=True):
    lease_seconds: Annotated[float, Meta(gt=0, extra=also("NOETL_LEASE_SEC"))] = 30.0


def test_another_name_of_a_setting_counts_where_its_own_is_not_set() -> None:
    others = DSN | {"NOETL_LEASE_SEC": "5"}

    assert load_config(OldNameConfig, others).lease_seconds == 5
    assert load_config(OldNameConfig, others | {"NOETL_LEASE_SECONDS": "7"}).lease_seconds == 7


def test_a_wrong_value_is_named_with_the_name_it_was_given_by() -> None:
    with pytest.raises(ConfigError, match="NOETL_LEASE_SEC='soon'"):
        load_config(OldNameConfig, DSN | {"NOETL_LEASE_SEC": "soon"})


def test_the_variables_by_which_shards_and_workers_were_known_before_are_understood() -> None:
    environ = DSN | {
        "NOETL_SHARD_LEASE_SEC": "3",
        "NOETL_SHARD_HEARTBEAT_SEC": "1",
        "NOETL_WORKER_POOL_RUNTIME": "gpu",
        "NOETL_WORKER_CAPACITY": "2",
        "NOETL_COMMAND_HEARTBEAT_TIMEOUT_SECONDS": "300",
    }

    shards, worker = load_config(ShardConfig, environ), load_config(WorkerConfig, environ)

    assert (shards.shard_lease_seconds, shards.shard_heartbeat_seconds) == (3, 1)
    assert (worker.pools, worker.worker_slots, worker.lease_seconds) == (("gpu",), 2, 300)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, ""),
        ({"NOETL_STORE_DIR": "/data"}, "/data/archive"),
        ({"NOETL_S3_BUCKET": "b"}, "s3://b/archive"),
        ({"NOETL_MINIO_BUCKET": "b"}, "s3://b/archive"),
        ({"NOETL_STORE_DIR": "/data", "NOETL_S3_BUCKET": "b"}, "/data/archive"),
        ({"NOETL_STORE_DIR": "/data", "NOETL_ARCHIVE_DIR": "s3://b/c"}, "s3://b/c"),
        ({"NOETL_ARCHIVE_DIR": "here/and:there"}, "here/and:there"),
    ],
)
def test_archives_have_one_place(environ: dict[str, str], place: str) -> None:
    assert load_config(StoreConfig, environ).archives == place


@pytest.mark.parametrize("place", ["gs://b/c", "https://b", "s3://", "s3:///c", "S3://b"])
def test_a_place_that_is_none_is_refused_at_the_start(place: str) -> None:
    with pytest.raises(ConfigError, match=f"NOETL_ARCHIVE_DIR='{place}'.*s3://BUCKET/PREFIX"):
        load_config(StoreConfig, {"NOETL_ARCHIVE_DIR": place})


def test_s3_is_reached_under_either_name() -> None:
    names = ("ENDPOINT", "ACCESS_KEY", "SECRET_KEY", "REGION")
    values = dict(zip(names, ("http://m:9000", "a", "s", "eu"), strict=True))
    wanted = S3Settings(endpoint="http://m:9000", access_key="a", secret_key="s", region="eu")
    for prefix in ("NOETL_S3_", "NOETL_MINIO_"):
        environ = {prefix + name: value for name, value in values.items()}

        assert s3_settings(load_config(StoreConfig, environ)) == wanted

    both = {"NOETL_S3_ENDPOINT": "http://one", "NOETL_MINIO_ENDPOINT": "http://two"}
    assert s3_settings(load_config(StoreConfig, both)).endpoint == "http://one"


@pytest.mark.parametrize("name", ["NOETL_S3_ACCESS_KEY", "NOETL_MINIO_SECRET_KEY"])
def test_half_a_key_is_refused_and_not_shown(name: str) -> None:
    with pytest.raises(ConfigError, match="set both, or neither") as refused:
        load_config(SampleConfig, DSN | {name: "not-to-be-told"})

    assert "not-to-be-told" not in str(refused.value)


def test_an_endpoint_has_no_password_in_it() -> None:
    with pytest.raises(ConfigError, match="NOETL_S3_ENDPOINT") as refused:
        load_config(StoreConfig, {"NOETL_S3_ENDPOINT": "http://me:not-to-be-told@m:9000"})

    assert "not-to-be-told" not in str(refused.value)


def test_a_service_with_rules_of_its_own_keeps_those_of_the_store() -> None:
    for kind in (ShardConfig, CompactorConfig):
        with pytest.raises(ConfigError, match="NOETL_ARCHIVE_DIR"):
            load_config(kind, DSN | {"NOETL_ARCHIVE_DIR": "gs://b"})
