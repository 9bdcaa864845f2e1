"""Where a gateway says that it can be reached."""

import socket

import pytest

from noetl_api_gateway.config import GatewayConfig, url_of
from noetl_core.process.config import ConfigError, load_config

DSN = {"NOETL_POSTGRES_DSN": "postgresql://nobody"}


def url(**environ: str) -> str:
    return url_of(load_config(GatewayConfig, DSN | environ), port=8082)


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", ""])
def test_one_that_listens_on_all_addresses_is_reached_by_the_name_of_its_host(
    everywhere: str,
) -> None:
    assert url(NOETL_GATEWAY_HOST=everywhere) == f"http://{socket.gethostname()}:8082"


def test_one_that_listens_on_one_address_is_reached_there() -> None:
    assert url() == "http://127.0.0.1:8082"
    assert url(NOETL_GATEWAY_HOST="::1") == "http://[::1]:8082"


def test_a_url_that_is_set_counts() -> None:
    given = "https://noetl.example.org/a"

    assert url(NOETL_GATEWAY_HOST="0.0.0.0", NOETL_SERVER_URL=given) == given


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="NOETL_SERVER_URL"):
        url(NOETL_SERVER_URL="noetl:8082")
