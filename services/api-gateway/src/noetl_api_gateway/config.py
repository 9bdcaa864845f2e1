"""What the gateway can be told through the environment."""

from typing import Annotated

from msgspec import Meta

from noetl_core.process.config import Config


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
