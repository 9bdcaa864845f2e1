"""noetl.audit: who did what. Rows are only ever added."""

from collections.abc import Mapping
from typing import Any

import msgspec

from noetl_core.store.postgres import Connection, Pool

_RECORD = """
INSERT INTO noetl.audit (actor, action, subject, details) VALUES ($1, $2, $3, $4::jsonb)
"""


async def record(
    conn: Connection | Pool,
    *,
    actor: str,
    action: str,
    subject: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    text = None if details is None else msgspec.json.encode(dict(details)).decode()
    await conn.execute(_RECORD, actor, action, subject, text)
