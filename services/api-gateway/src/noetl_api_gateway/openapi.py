"""The OpenAPI document and a page for people, both made from the table of endpoints."""

import re
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from noetl_api_gateway.answers import PROBLEM_MEDIA_TYPE, answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_core.wire.http import ProblemDetails

API_VERSION = "1.0.0"
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(?P<name>\w+)(?::\w+)?\}")


def describe(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """The endpoints that describe the others."""
    document = openapi_document(endpoints)
    page = _page(endpoints)

    async def openapi(_gateway: Gateway, _request: Request) -> Response:
        return answer(200, document)

    async def docs(_gateway: Gateway, _request: Request) -> Response:
        return HTMLResponse(page)

    return (
        Endpoint(method="GET", path="/openapi.json", summary="", handle=openapi, answers={}),
        Endpoint(method="GET", path="/docs", summary="", handle=docs, answers={}),
    )


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    schemas = _Schemas(endpoints)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PARAMETER.sub(r"{\g<name>}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "NoETL",
            "version": API_VERSION,
            "description": "Start, watch and cancel executions of playbooks. Ids are strings.",
        },
        "paths": paths,
        "components": {"schemas": schemas.components},
    }


class _Schemas:
    """The JSON Schema of every body, each named once."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        kinds: list[Any] = [ProblemDetails]
        for endpoint in endpoints:
            bodies = (endpoint.body, *endpoint.answers.values())
            kinds += [kind for kind in bodies if kind is not None and kind not in kinds]
        schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self._kinds = kinds
        self._schemas = schemas
        self.components: dict[str, Any] = dict(sorted(components.items()))

    def of(self, kind: Any) -> dict[str, Any]:
        return self._schemas[self._kinds.index(kind)]


def _operation(endpoint: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "operationId": _operation_id(endpoint),
    }
    if endpoint.handle.__doc__:
        operation["description"] = " ".join(endpoint.handle.__doc__.split())
    parameters = [*_path_parameters(endpoint), *_query_parameters(endpoint), *_headers(endpoint)]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = _request_body(endpoint, schemas)
    operation["responses"] = _responses(endpoint, schemas)
    return operation


def _operation_id(endpoint: Endpoint) -> str:
    module = endpoint.handle.__module__.rsplit(".", 1)[-1]
    return f"{module}.{endpoint.handle.__name__}.{endpoint.method.lower()}"


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(endpoint.path)
    ]


def _query_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    if endpoint.query is None:
        return []
    _, components = msgspec.json.schema_components([endpoint.query])
    properties = components[endpoint.query.__name__]["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in properties.items()
    ]


def _headers(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
        for name, text in endpoint.headers.items()
    ]


def _request_body(endpoint: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    content = {
        media_type: {"schema": schemas.of(endpoint.body)}
        if media_type == "application/json"
        else {"schema": {"type": "string"}}
        for media_type in endpoint.body_media_types
    }
    return {"required": endpoint.body_required, "content": content}


def _responses(endpoint: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in endpoint.answers.items():
        responses[str(status)] = {"description": endpoint.summary}
        if kind is not None:
            content = {endpoint.media_type: {"schema": schemas.of(kind)}}
            responses[str(status)]["content"] = content
    problem = {PROBLEM_MEDIA_TYPE: {"schema": schemas.of(ProblemDetails)}}
    for status in endpoint.problems:
        responses[str(status)] = {"description": "A problem", "content": problem}
    responses["default"] = {"description": "A problem", "content": problem}
    return responses


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>NoETL API</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
td {{ padding: .2rem 1rem .2rem 0; vertical-align: top }} code {{ white-space: nowrap }}
</style></head><body>
<h1>NoETL API</h1>
<p>The whole description, for tools: <a href="/openapi.json">/openapi.json</a>.</p>
{sections}
</body></html>
"""


def _page(endpoints: Sequence[Endpoint]) -> str:
    tags = dict.fromkeys(endpoint.tag for endpoint in endpoints)
    return _PAGE.format(sections="\n".join(_section(tag, endpoints) for tag in tags))


def _section(tag: str, endpoints: Sequence[Endpoint]) -> str:
    rows = "\n".join(
        f"<tr><td><code>{endpoint.method} {escape(endpoint.path)}</code></td>"
        f"<td>{escape(endpoint.summary)}</td></tr>"
        for endpoint in endpoints
        if endpoint.tag == tag
    )
    return f"<h2>{escape(tag.capitalize())}</h2>\n<table>\n{rows}\n</table>"
