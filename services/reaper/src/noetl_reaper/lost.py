"""Commands that are open in the state of their execution and have vanished from the queue.

The log has them, so the broker can issue them anew; this is how it is noticed, also beside others
of the same execution that run, or wait for days. Whether one is lost the broker decides for itself.
"""

from noetl_core.domain.ids import ExecutionId
from noetl_core.store import stuck
from noetl_core.store.command import CommandKey
from noetl_core.store.postgres import Pool

EXECUTIONS_MAX = 2000
"""That are looked at in one turn: their states are read."""
COMMANDS_MAX = 10_000
"""That are found in one turn, and remembered of each of two rounds."""


class LostCommands:
    """A round goes through all that run, and what two rounds find is lost."""

    def __init__(self) -> None:
        self._after = ExecutionId(0)
        self._before: frozenset[CommandKey] = frozenset()
        self._found: set[CommandKey] = set()

    async def look(self, pool: Pool) -> list[ExecutionId]:
        """One page. Says of which executions something was missing in the last round as well."""
        page = await stuck.unqueued(
            pool, self._after, executions_max=EXECUTIONS_MAX, commands_max=COMMANDS_MAX
        )
        lost = [key for key in page.commands if key in self._before]
        if len(self._found) < COMMANDS_MAX:
            self._found.update(page.commands)
        if page.upto is None:
            self._before, self._found = frozenset(self._found), set()
        self._after = page.upto or ExecutionId(0)
        return list(dict.fromkeys(execution_id for execution_id, _ in lost))
