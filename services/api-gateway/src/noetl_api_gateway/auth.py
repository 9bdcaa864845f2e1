"""Who asks, and whether that one may: `Authorization: Bearer KEY`, and the role of the key.

An endpoint that is only for some calls `check_role` before anything else. The others are as open as
the network in front of the gateway lets them be.
"""

from starlette.requests import Request

from noetl_api_gateway.endpoint import Gateway
from noetl_api_gateway.requests import RequestError
from noetl_core.domain.roles import Role, includes
from noetl_core.store import api_key

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="noetl"'}


async def check_role(gateway: Gateway, request: Request, least: Role, *, is_required: bool) -> None:
    """Raises 401 without a key that counts, 403 with one whose role is below `least`.

    Where a key is not required it is asked for all the same as soon as somebody has made one.
    """
    shown = _shown(request)
    if shown is None:
        if is_required or await api_key.are_used(gateway.pool):
            detail = "this needs an API key: send it as `Authorization: Bearer KEY`"
            raise _unknown(f"{detail}; `noetl api-key create NAME --role {least}` makes one")
        return
    found = await api_key.find(gateway.pool, api_key.digest_of(shown))
    if found is None:
        raise _unknown("there is no such API key, or it was revoked, or its time is over")
    if not includes(found.role, least):
        detail = f"the API key `{found.name}` has the role {found.role}; this needs {least}"
        raise RequestError(403, detail)


def _shown(request: Request) -> str | None:
    header = request.headers.get("authorization")
    if header is None:
        return None
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unknown("only `Authorization: Bearer KEY` is understood here")
    return key.strip()


def _unknown(detail: str) -> RequestError:
    return RequestError(401, detail, headers=_CHALLENGE)
