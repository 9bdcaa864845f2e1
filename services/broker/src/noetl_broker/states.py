"""The states of executions, kept in memory as long as the shard is ours.

A cache and nothing more: dropping any entry costs a read (the snapshot of the projection and the
tail of the log after it), never an answer.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

import msgspec
import structlog

from noetl_broker.metrics import REPLAYED
from noetl_core.domain.errors import NotFoundError
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import CatalogId, ExecutionId, RefId, ShardId
from noetl_core.domain.known import Known
from noetl_core.domain.parse import parse_playbook
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.sharding import shard_of
from noetl_core.domain.state import ExecutionState
from noetl_core.process.recent import Recent
from noetl_core.store import catalog, event, snapshot
from noetl_core.store.postgres import Connection
from noetl_core.wire.messages import Stored

STATES_BYTES_MAX = 32 * 1024 * 1024
"""As JSON: decoded they take up to eight times as much."""

_encode = msgspec.json.Encoder().encode

log = structlog.get_logger()

PLAYBOOKS_MAX = 500
TAIL_PAGE = 1000
"""Events of an execution that are folded at once: between two pages leases are renewed."""


class Live:
    """An execution in memory: its state, and the stored values its decisions have read."""

    __slots__ = ("fresh", "known", "state")

    def __init__(self, state: ExecutionState) -> None:
        self.state = state
        self.known = Known()
        self.fresh: dict[RefId, Stored] = {}
        """Results that came with a message of this turn: not in the database yet."""

    def forget_values(self) -> None:
        """What a turn has read may be large; the store of results keeps what is read often."""
        self.known = Known()
        self.fresh.clear()


class States:
    def __init__(
        self, *, states_max: int, shard_count: int, bytes_max: int = STATES_BYTES_MAX
    ) -> None:
        self.shard_count = shard_count
        self._live: Recent[ExecutionId, Live] = Recent(count_max=states_max, bytes_max=bytes_max)

    def get(self, execution_id: ExecutionId) -> Live:
        """What is in memory; for an execution that is not, the state before its first event.

        That is right for one whose Start came just now. If it was started before, the commit says
        so (its first event is recorded already) and the batch is redone with the state loaded.
        """
        live = self._live.get(execution_id)
        if live is None:
            live = Live(ExecutionState(execution_id=execution_id))
            self._live.put(execution_id, live)
        return live

    def drop(self, execution_ids: Iterable[ExecutionId]) -> None:
        for execution_id in execution_ids:
            self._live.forget(execution_id)

    def drop_shards(self, shards: Collection[ShardId]) -> None:
        self.drop([e for e in self._live if shard_of(e, shard_count=self.shard_count) in shards])

    def recount(self, shard_count: int) -> None:
        """All shards were taken from everybody when the count changed: so was what we know."""
        if shard_count != self.shard_count:
            self.shard_count = shard_count
            self._live.clear()

    def settle(self, execution_id: ExecutionId) -> bool:
        """A turn with it is committed: keep the state alone. False when it has ended, and is let
        go of."""
        live = self._live.get(execution_id)
        if live is None or live.state.is_terminal:
            self._live.forget(execution_id)
            return False
        live.forget_values()
        self._live.put(execution_id, live, size=_size_of(live.state))
        return True

    def trim(self) -> None:
        self._live.trim()

    async def load(
        self, conn: Connection, execution_ids: Iterable[ExecutionId]
    ) -> dict[ExecutionId, str]:
        """Read what is not here yet: few queries, however many executions.

        Returns those whose log cannot be read, with the reason.
        """
        missing = [e for e in execution_ids if e not in self._live]
        if not missing:
            return {}
        loaded = await snapshot.read(conn, missing)
        states = {e: loaded.get(e) or ExecutionState(execution_id=e) for e in missing}
        replayed, unreadable = await _replay(conn, states)
        REPLAYED.add(replayed)
        if loaded or replayed:
            log.info("states.replayed", executions=len(missing), events=replayed)
        for execution_id, state in states.items():
            if execution_id not in unreadable:
                self._live.put(execution_id, Live(state), size=_size_of(state))
        return unreadable


def _size_of(state: ExecutionState) -> int:
    return len(_encode(state))


async def _replay(
    conn: Connection, states: dict[ExecutionId, ExecutionState]
) -> tuple[int, dict[ExecutionId, str]]:
    """Fold what the log has past these states, page by page. Says how many events that were, and
    of whom one could not be folded."""
    replayed = 0
    unreadable: dict[ExecutionId, str] = {}
    behind = {e: state.last_event_id for e, state in states.items()}
    while behind:
        rows = await event.read_tails(conn, behind, limit=TAIL_PAGE)
        counts = Counter(row["execution_id"] for row in rows)
        for row in rows:
            execution_id = row["execution_id"]
            try:
                if execution_id not in unreadable:
                    fold(states[execution_id], event.event_of(row))
            except Exception as error:  # noqa: BLE001 - one bad log, whatever it is, never stops a shard
                reason = f"{type(error).__name__}: {error}"
                unreadable[execution_id] = f"its event {row['event_id']} cannot be read: {reason}"
        replayed += len(rows)
        behind = {
            e: states[e].last_event_id
            for e, count in counts.items()
            if count == TAIL_PAGE and e not in unreadable
        }
    return replayed, unreadable


class Playbooks:
    """Parsed playbooks by version. A version never changes, so an entry never goes stale."""

    def __init__(self) -> None:
        self._playbooks: OrderedDict[CatalogId, Playbook] = OrderedDict()

    async def get(self, conn: Connection, catalog_id: CatalogId) -> Playbook:
        playbook = self._playbooks.get(catalog_id)
        if playbook is None:
            content = await catalog.content_of(conn, catalog_id)
            if content is None:
                raise NotFoundError(f"the catalog has no playbook {catalog_id}")
            playbook = parse_playbook(content, file=f"catalog {catalog_id}")
            self._playbooks[catalog_id] = playbook
        self._playbooks.move_to_end(catalog_id)
        if len(self._playbooks) > PLAYBOOKS_MAX:
            self._playbooks.popitem(last=False)
        return playbook
