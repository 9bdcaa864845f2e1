"""Playbooks: register, validate, list, read."""

import asyncio
import hashlib

from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import (
    JSON,
    YAML_MEDIA_TYPES,
    RequestError,
    json_body,
    media_type,
    query,
    read_body,
    text_of,
)
from noetl_core.domain.errors import NotFoundError, PlaybookInvalidError
from noetl_core.domain.ids import CatalogId
from noetl_core.domain.parse import parse_playbook, warnings_of
from noetl_core.domain.playbook import Playbook
from noetl_core.store import catalog
from noetl_core.store.catalog import CatalogEntry, Registration
from noetl_core.store.postgres import Connection, in_transaction
from noetl_core.wire import http
from noetl_core.wire.http import PLAYBOOK_BYTES_MAX


async def register(gateway: Gateway, request: Request) -> Response:
    """Unchanged content gives the version that is there: registering is safe to repeat."""
    content = await _content(request)
    playbook = await _parse(content)

    async def add(conn: Connection) -> Registration:
        return await catalog.register(
            conn,
            CatalogId(gateway.mint()),
            path=playbook.path,
            content=content,
            sha256=hashlib.sha256(content.encode()).digest(),
        )

    async with gateway.pool.acquire() as conn:
        registered = await in_transaction(conn, add)
    entry = registered.entry
    body = http.Registered(
        catalog_id=str(entry.catalog_id),
        path=entry.path,
        version=entry.version,
        created=registered.created,
        warnings=list(warnings_of(playbook)),
    )
    return answer(201 if registered.created else 200, body)


async def validate(_gateway: Gateway, request: Request) -> Response:
    """Whether a playbook would be accepted. Nothing is stored."""
    content = await _content(request)
    try:
        playbook = await _parse(content)
    except PlaybookInvalidError as error:
        return answer(200, http.Validated(valid=False, problems=error.problems))
    warnings = list(warnings_of(playbook))
    return answer(200, http.Validated(valid=True, path=playbook.path, problems=warnings))


async def list_newest(gateway: Gateway, request: Request) -> Response:
    """The newest version of every path, in order of path."""
    asked = query(request, http.CatalogQuery)
    entries = await catalog.newest_of_each(
        gateway.pool, after_path=asked.cursor, limit=asked.limit + 1
    )
    shown = entries[: asked.limit]
    more = len(entries) > asked.limit
    page = http.CatalogPage(
        items=[_item(entry) for entry in shown], next_cursor=shown[-1].path if more else None
    )
    return answer(200, page)


async def read(gateway: Gateway, request: Request) -> Response:
    path = text_of(request, "path")
    version = query(request, http.VersionQuery).version
    found = await catalog.read(gateway.pool, path, version=version)
    if found is None:
        raise not_in_catalog(path, version)
    document = http.CatalogDocument(
        catalog_id=str(found.catalog_id),
        path=found.path,
        version=found.version,
        created_at=found.created_at,
        sha256=found.sha256.hex(),
        content=found.content,
    )
    return answer(200, document)


def not_in_catalog(path: str, version: int | None) -> NotFoundError:
    which = "" if version is None else f" version {version}"
    return NotFoundError(f"the catalog has no playbook {path!r}{which}")


async def _content(request: Request) -> str:
    """The playbook's text: the body itself, or the field `content` of a JSON body."""
    if media_type(request) == JSON:
        content = (await json_body(request, http.RegisterRequest)).content
    elif media_type(request) in YAML_MEDIA_TYPES:
        content = _text(await read_body(request, bytes_max=PLAYBOOK_BYTES_MAX))
    else:
        raise RequestError(415, f"send a playbook as `text/yaml`, or in JSON as `{JSON}`")
    if len(content.encode()) > PLAYBOOK_BYTES_MAX:
        raise RequestError(413, f"a playbook may have up to {PLAYBOOK_BYTES_MAX} bytes")
    return content


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the playbook is not UTF-8: {error.reason}") from None


async def _parse(content: str) -> Playbook:
    """In a thread: a large document takes longer than others should wait."""
    return await asyncio.to_thread(parse_playbook, content)


def _item(entry: CatalogEntry) -> http.CatalogItem:
    return http.CatalogItem(
        catalog_id=str(entry.catalog_id),
        path=entry.path,
        version=entry.version,
        created_at=entry.created_at,
    )


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/catalog/register",
        tag="catalog",
        summary="Register a playbook; unchanged content keeps its version",
        handle=register,
        body=http.RegisterRequest,
        body_media_types=(JSON, "text/yaml"),
        answers={201: http.Registered, 200: http.Registered},
        problems=(400, 413, 415, 422),
    ),
    Endpoint(
        method="POST",
        path="/api/catalog/validate",
        tag="catalog",
        summary="Check a playbook without storing it",
        handle=validate,
        body=http.RegisterRequest,
        body_media_types=(JSON, "text/yaml"),
        answers={200: http.Validated},
        problems=(400, 413, 415, 422),
    ),
    Endpoint(
        method="GET",
        path="/api/catalog",
        tag="catalog",
        summary="List the newest version of every path",
        handle=list_newest,
        query=http.CatalogQuery,
        answers={200: http.CatalogPage},
        problems=(422,),
    ),
    Endpoint(
        method="GET",
        path="/api/catalog/{path:path}",
        tag="catalog",
        summary="Read a playbook: that version, or the newest",
        handle=read,
        query=http.VersionQuery,
        answers={200: http.CatalogDocument},
        problems=(404, 422),
    ),
)
