"""What the gateway can be told through the environment."""

import socket
from typing import Annotated, Literal

from msgspec import Meta

from noetl_core.process.config import Config

_ALL_ADDRESSES = ("", "0.0.0.0", "::")  # noqa: S104 - nothing listens there because of this


class GatewayConfig(Config, frozen=True, kw_only=True):
    gateway_host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    gateway_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    ] = 8082
    gateway_pool_size: Annotated[
        int, Meta(gt=0, le=200, description="Connections to Postgres.")
    ] = 8
    encryption_key: Annotated[
        str, Meta(description="Keys for credentials, newest first; empty stores none.")
    ] = ""
    gateway_drain_seconds: Annotated[
        float, Meta(ge=0, le=60, description="How long requests may finish after a stop.")
    ] = 3.0
    server_name: Annotated[
        str,
        Meta(
            description="What this gateway is registered as; by default server-, its host and its "
            "port, which a restart does not change."
        ),
    ] = ""
    server_url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^@\s]+)?\Z",
            description="Where others reach this gateway, as its registration says; by default its "
            "address, or its host's name where it listens on all of them, and its port.",
        ),
    ] = ""
    auto_recreate_runtime: Annotated[
        bool,
        Meta(description="Register a process anew whose heartbeat says enough, if it is unknown."),
    ] = True
    query_enabled: Annotated[
        bool, Meta(description="Allow questions in SQL, read-only, at /api/postgres/execute.")
    ] = False
    query_role: Annotated[
        Literal["", "reader", "operator", "admin"],
        Meta(
            description="The least role of the API key that may ask in SQL. Empty: operator, as "
            "soon as there are API keys, and until then whoever reaches the gateway."
        ),
    ] = ""
    query_connections: Annotated[
        int, Meta(gt=0, le=20, description="Questions in SQL at once, on connections of their own.")
    ] = 2
    query_timeout_seconds: Annotated[
        float, Meta(gt=0, le=60, description="How long one question in SQL may take.")
    ] = 5.0
    query_rows_max: Annotated[
        int, Meta(gt=0, le=100_000, description="Rows of the answer to a question in SQL.")
    ] = 1000


def url_of(config: GatewayConfig, *, port: int) -> str:
    """Where others reach it. Nobody can go to the address that stands for all of a host's."""
    if config.server_url:
        return config.server_url
    host = config.gateway_host
    if host in _ALL_ADDRESSES:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
