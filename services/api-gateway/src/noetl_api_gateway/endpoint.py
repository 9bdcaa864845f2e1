"""The shape of an endpoint, and what every endpoint may use.

The table of endpoints is the one description of the API: the application routes by it and the
OpenAPI document is made from it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.ends import EndWatch
from noetl_api_gateway.questions import Questions
from noetl_api_gateway.rendering import Renderer
from noetl_core.blob import ResultStore
from noetl_core.bus.connection import Bus
from noetl_core.process.secrets import Keyring
from noetl_core.store.postgres import Pool


@dataclass(frozen=True, kw_only=True)
class Gateway:
    pool: Pool
    bus: Bus
    mint: Callable[[], int]
    results: ResultStore
    keyring: Keyring | None
    ends: EndWatch
    renderer: Renderer
    auto_recreate_runtime: bool = True
    questions: Questions | None = None
    """None where nobody may ask in SQL."""


Handler = Callable[[Gateway, Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """`answers` maps a status to the struct of its body; None for a body that is no JSON."""

    method: str
    path: str
    summary: str
    handle: Handler
    answers: dict[int, Any]
    tag: str = ""
    query: type[Any] | None = None
    body: type[Any] | None = None
    body_media_types: tuple[str, ...] = ("application/json",)
    body_required: bool = True
    problems: tuple[int, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    media_type: str = "application/json"
