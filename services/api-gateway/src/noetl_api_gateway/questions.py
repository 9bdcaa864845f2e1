"""Where questions in SQL run: on connections of their own, a few at a time.

Whoever asks something that takes long keeps others who ask waiting, and nobody else.
"""

from dataclasses import dataclass

from noetl_api_gateway.requests import RequestError
from noetl_core.domain.roles import Role
from noetl_core.store import query
from noetl_core.store.postgres import Pool
from noetl_core.store.query import QueryAnswer
from noetl_core.wire.http import RESULTS_BYTES_MAX


@dataclass(frozen=True, kw_only=True)
class QueryLimits:
    """How much one question may take, how many run at once, and who may ask.

    `role` empty: a key with the role `operator`, as soon as there are keys.
    """

    seconds: float = 5.0
    rows_max: int = 1000
    at_once: int = 2
    role: Role | None = None

    @property
    def least(self) -> Role:
        return self.role or "operator"


class Questions:
    def __init__(self, pool: Pool, limits: QueryLimits) -> None:
        self.limits = limits
        self._pool = pool
        self._running = 0

    async def ask(self, statement: str) -> QueryAnswer:
        if self._running >= self.limits.at_once:
            detail = f"{self._running} questions are being answered already: ask again in a moment"
            raise RequestError(429, detail, headers={"Retry-After": "1"})
        self._running += 1
        try:
            async with self._pool.acquire() as conn:
                return await query.ask(
                    conn,
                    statement,
                    row_limit=self.limits.rows_max + 1,
                    bytes_max=RESULTS_BYTES_MAX,
                    seconds=self.limits.seconds,
                )
        finally:
            self._running -= 1
