"""The commands of this worker: begun when leased, reported when done, stopped when gone."""

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from noetl_core.domain.ids import WorkerId
from noetl_core.store import command
from noetl_core.store.command import CommandKey, Leased
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Failed
from noetl_worker.emit import Outbox
from noetl_worker.held import Held
from noetl_worker.metrics import TALLY
from noetl_worker.perform import Performer
from noetl_worker.tool_slots import ToolSlots

log = structlog.get_logger()


class Work:
    def __init__(
        self,
        held: Held,
        outbox: Outbox,
        performer: Performer,
        *,
        slots: int,
        is_crowded: Callable[[], bool],
        tool_slots: ToolSlots,
    ) -> None:
        self._held = held
        self._outbox = outbox
        self._performer = performer
        self._slots = slots
        self._is_crowded = is_crowded
        self._tool_slots = tool_slots
        self.on_slot_freed: Callable[[], None] = _nothing
        self.on_confirmation_wanted: Callable[[], None] = _nothing

    def free_slots(self) -> int:
        if self._held.is_full or self._is_crowded():
            return 0
        return self._slots - self._held.running

    @property
    def is_idle(self) -> bool:
        return self._held.running == 0

    def begin(self, leased: Leased) -> None:
        if leased.key in self._held:
            # Postgres had forgotten the lease, and we have taken it again: it goes on as it is.
            return
        self._tool_slots.take(leased.requires)
        task = asyncio.create_task(self._run(leased), name=leased.command_id)
        self._held.add(leased, task)
        task.add_done_callback(partial(self._ended, leased.key))
        self._outbox.claim(leased)

    async def _run(self, leased: Leased) -> None:
        try:
            message = await self._performer.perform(leased)
        except asyncio.CancelledError:
            self._held.drop(leased.key)
            raise
        except Exception as error:  # noqa: BLE001 - it is told, here and to the broker
            message = self._performer.broken(leased, error)
        finally:
            self._tool_slots.give_back(leased.requires)
            self.on_slot_freed()
        self._outbox.finish(leased, message)
        if isinstance(message, Failed):
            log.info(
                "command.failed",
                execution_id=leased.execution_id,
                command_id=leased.command_id,
                kind=message.error.kind,
            )
        if self._held.wants_confirmation:
            self.on_confirmation_wanted()

    def _ended(self, key: CommandKey, task: asyncio.Task[None]) -> None:
        """A task that died said nothing of its command. We let go of it: its lease runs out, and
        somebody else has the next attempt."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._held.abandon(key)
            log.error("command.died", command_id=key[1], exc_info=error)

    def judge(self, asked: list[CommandKey], still_there: set[CommandKey], asked_at: float) -> None:
        """What a heartbeat found: stop what is no longer ours, repeat what was not recorded."""
        verdict = self._held.judge(asked, still_there, asked_at)
        for stopped in verdict.stopped:
            log.info("command.stopped", command_id=stopped.leased.command_id)
            if not stopped.task.cancelling():
                # Once: some take longer to stop than until the next heartbeat.
                self._performer.stopped(stopped.leased, begun_ns=stopped.begun_ns)
            stopped.task.cancel()
        TALLY.stopped += len(verdict.stopped)
        TALLY.repeated += len(verdict.overdue)
        if verdict.overdue:
            log.info("results.repeated", count=len(verdict.overdue))
            self._outbox.repeat(verdict.overdue)
        if verdict.confirmed:
            # Where unconfirmed results kept us from taking work, there is room again.
            self.on_slot_freed()

    async def drain(self, pool: Pool, worker_id: WorkerId, *, seconds: float) -> None:
        """Let what runs come to its end, send everything, and give back what is left."""
        tasks = [running.task for running in self._held.running_commands()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        left = self._held.running_commands()
        for running in left:
            running.task.cancel()
        await self._outbox.flush()
        if left:
            # The next attempt starts when the reaper sees this, not when the lease runs out.
            await command.give_back(pool, worker_id, [running.leased.key for running in left])
            log.info("commands.given_back", count=len(left))


def _nothing() -> None:
    pass
