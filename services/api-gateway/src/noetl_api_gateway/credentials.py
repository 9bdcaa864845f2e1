"""Credentials: written here, read by workers only. What was written never comes back."""

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import RequestError, json_body, query, text_of
from noetl_core.domain.errors import NotFoundError
from noetl_core.process.secrets import Keyring
from noetl_core.store import audit, credential
from noetl_core.store.credential import CredentialEntry
from noetl_core.store.postgres import Connection, in_transaction
from noetl_core.wire import http

ACTOR = "anonymous"
"""Until clients prove who they are, the audit can say what happened but not who did it."""


async def put(gateway: Gateway, request: Request) -> Response:
    """Store a credential, or replace the one of this name."""
    asked = await json_body(request, http.CredentialRequest)
    sealed = _keyring(gateway).encrypt(asked.name, asked.data)

    async def store(conn: Connection) -> CredentialEntry:
        details = {"type": asked.type}
        entry = await credential.upsert(conn, asked.name, kind=asked.type, sealed=sealed)
        await audit.record(
            conn, actor=ACTOR, action="credential.put", subject=asked.name, details=details
        )
        return entry

    async with gateway.pool.acquire() as conn:
        return answer(200, _item(await in_transaction(conn, store)))


async def list_entries(gateway: Gateway, request: Request) -> Response:
    asked = query(request, http.CredentialsQuery)
    entries = await credential.list_entries(
        gateway.pool, after_name=asked.cursor, limit=asked.limit + 1
    )
    shown = entries[: asked.limit]
    more = len(entries) > asked.limit
    page = http.CredentialPage(
        items=[_item(entry) for entry in shown], next_cursor=shown[-1].name if more else None
    )
    return answer(200, page)


async def delete(gateway: Gateway, request: Request) -> Response:
    name = text_of(request, "name")

    async def remove(conn: Connection) -> None:
        if not await credential.delete(conn, name):
            raise NotFoundError(f"there is no credential {name!r}")
        await audit.record(conn, actor=ACTOR, action="credential.delete", subject=name)

    async with gateway.pool.acquire() as conn:
        await in_transaction(conn, remove)
    return Response(status_code=204)


def _keyring(gateway: Gateway) -> Keyring:
    if gateway.keyring is None:
        detail = (
            "credentials cannot be stored here: start the gateways and workers with the same "
            "NOETL_ENCRYPTION_KEY, 32 bytes in base64 (`openssl rand -base64 32`)"
        )
        raise RequestError(403, detail)
    return gateway.keyring


def _item(entry: CredentialEntry) -> http.CredentialItem:
    return http.CredentialItem(
        name=entry.name,
        type=entry.type,
        created_at=entry.created_at,
        updated_at=entry.updated_at,
    )


_PUT = Endpoint(
    method="PUT",
    path="/api/credentials",
    tag="credentials",
    summary="Store or replace a credential; its data never comes back",
    handle=put,
    body=http.CredentialRequest,
    answers={200: http.CredentialItem},
    problems=(400, 403, 413, 415, 422),
)

ENDPOINTS = (
    _PUT,
    replace(_PUT, method="POST"),
    Endpoint(
        method="GET",
        path="/api/credentials",
        tag="credentials",
        summary="List credentials by name, without their data",
        handle=list_entries,
        query=http.CredentialsQuery,
        answers={200: http.CredentialPage},
        problems=(422,),
    ),
    Endpoint(
        method="DELETE",
        path="/api/credentials/{name}",
        tag="credentials",
        summary="Delete a credential",
        handle=delete,
        answers={204: None},
        problems=(404,),
    ),
)
