"""Credentials, opened here and nowhere else. They stay in this process: no event, result or log."""

import time
from typing import NamedTuple

from noetl_core.domain.errors import ToolError
from noetl_core.process.secrets import Keyring, SecretsError
from noetl_core.store import credential
from noetl_core.store.postgres import Pool
from noetl_worker.tools.tool import Credential, ToolFailedError

KEEP_SECONDS = 60.0
"""How long a changed credential may still be used."""

CREDENTIALS_MAX = 1000


class _Kept(NamedTuple):
    credential: Credential
    until: float


class Credentials:
    def __init__(self, pool: Pool, keyring: Keyring | None) -> None:
        self._pool = pool
        self._keyring = keyring
        self._kept: dict[str, _Kept] = {}

    async def open(self, name: str) -> Credential:
        """Raises ToolFailedError for one that is not there or cannot be opened."""
        kept = self._kept.get(name)
        if kept is not None and kept.until > time.monotonic():
            return kept.credential
        if self._keyring is None:
            raise _failed("NO_KEY", f"credential {name!r}: this worker has no NOETL_ENCRYPTION_KEY")
        row = await credential.load(self._pool, name)
        if row is None:
            raise _failed("CREDENTIAL_NOT_FOUND", f"there is no credential {name!r}")
        try:
            opened = Credential(name, row.type, self._keyring.decrypt(name, row.sealed))
        except SecretsError as error:
            raise _failed("CREDENTIAL_UNREADABLE", str(error)) from None
        self._keep(opened)
        return opened

    def _keep(self, opened: Credential) -> None:
        if len(self._kept) >= CREDENTIALS_MAX:
            self._kept.clear()
        self._kept[opened.name] = _Kept(opened, time.monotonic() + KEEP_SECONDS)


def _failed(code: str, message: str) -> ToolFailedError:
    return ToolFailedError(ToolError(kind="auth", code=code, message=message))
