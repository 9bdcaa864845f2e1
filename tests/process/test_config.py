"""process/config.py: the environment becomes a struct, or names what is wrong with it."""

from typing import Annotated

import pytest
from msgspec import Meta

from noetl_core.process.config import Config, ConfigError, load_config
from noetl_core.process.ownership import ShardConfig

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


@pytest.mark.parametrize("value", ["0", "many", "1.5", ""])
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

    with pytest.raises(ConfigError, match="shard_heartbeat_seconds"):
        load_config(ShardConfig, environ)
