"""One frame of a cursor loop: claim rows, run the step's pipeline on them, say how many there were.

    claim ─┬─ no rows: this slot of the loop has ended
           └─ rows ─┬─ process: row     the pipeline once a row, row_concurrency at a time
                    └─ process: frame   the pipeline once, with all of them

The claim is the user's statement in the user's database, and commits there by itself. We decide
nothing about who holds a row: the statement does, with `__frame_lease_seconds` and whatever it
writes into the row.

Crash analysis. We die
- before the claim has committed: the next attempt claims.
- after it: the rows are claimed and nobody works on them. They come back when the statement lets a
  lapsed claim be taken again. Until then an attempt that claims nothing ends its slot, and the loop
  may end without them; so a statement does well to take back at once what the same command has
  claimed before, by the key that all attempts of it share:

      UPDATE work SET claimed_by = '{{ idempotency_key }}',
                      claimed_until = now() + {{ __frame_lease_seconds }} * interval '1 second'
      WHERE id IN (SELECT id FROM work
                   WHERE NOT done AND (claimed_by IS NULL OR claimed_until < now()
                                       OR claimed_by = '{{ idempotency_key }}')
                   ORDER BY id LIMIT {{ __frame_max_rows }} FOR UPDATE SKIP LOCKED)
      RETURNING id, ...

- in the middle of the frame: the same. Rows before that may run again; what they did is done.
- after the end is said: it is recorded, or said again (see held.py).

Another attempt may get other rows. So the idempotency key of a run is not that of the command: it
holds what was claimed too, or a target would take the new rows for the old ones and drop them.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from noetl_core.blob import ReferenceNotAvailableError
from noetl_core.domain.errors import TemplateError, ToolError
from noetl_core.domain.ids import CommandId
from noetl_core.domain.playbook import Frame, Task
from noetl_core.domain.result_view import value_of
from noetl_core.domain.route import template_failure
from noetl_core.store.command import Leased
from noetl_worker.names import Names
from noetl_worker.pipeline import Ended, Runner
from noetl_worker.plan import Rendering, StepPlan, TaskPlan
from noetl_worker.tools.tool import ToolFailedError, ToolParked

ROW_ERRORS_SHOWN_MAX = 20
_DIGEST_CHARS = 16

_NOTHING = Rendering({}, is_templated=False, field="loop.cursor")
_CLAIM = TaskPlan(
    task=Task(label="claim", kind="postgres"),
    field="loop.cursor",
    raw={},
    config=_NOTHING,
    input=_NOTHING,
    set=_NOTHING,
)


class Run(Protocol):
    """Runs the pipeline once. `leased.command_id` says what the run is about, for its key."""

    async def __call__(self, names: Names, leased: Leased) -> Ended: ...


async def run_frame(
    plan: StepPlan, names: Names, leased: Leased, *, claim: Runner, run: Run
) -> Ended:
    assert plan.step.loop is not None, plan.step.step
    frame = plan.step.loop.spec.frame
    rows = await _claimed(plan, names, claim)
    if isinstance(rows, ToolError):
        return Ended(error=rows)
    if not rows:
        return Ended(frame_rows=0)
    if frame.process == "frame":
        ended = await _run_whole(rows, names, leased, run)
    else:
        ended = await _Rows(plan, frame, rows, names, leased, run).run()
    return ended._replace(frame_rows=len(rows))


async def _claimed(plan: StepPlan, names: Names, claim: Runner) -> list[Any] | ToolError:
    assert plan.cursor is not None, plan.step.step
    names.begin_claim()
    try:
        given = await names.claim_input()
        cursor = await names.rendered(plan.cursor, given, with_keychain=True)
        config = {"auth": cursor["auth"], "command": cursor["claim"]}
        result = await claim(_CLAIM, config, given, 1)
    except TemplateError as error:
        return template_failure(error)
    except ReferenceNotAvailableError as error:
        return error.as_tool_error()
    except ToolFailedError as error:
        return _of_the_claim(error.error)
    assert not isinstance(result, ToolParked), result
    if result.error is not None:
        return _of_the_claim(result.error)
    return _rows_of(result.data)


def _rows_of(data: Mapping[str, Any]) -> list[Any] | ToolError:
    rows: list[Any] = data["rows"]
    if not rows and data["row_count"]:
        message = (
            f"`loop.cursor.claim` changed {data['row_count']} rows and returned none of them: "
            "end it with RETURNING"
        )
        return ToolError(kind="client_error", code="NO_ROWS_RETURNED", message=message)
    return rows


async def _run_whole(rows: list[Any], names: Names, leased: Leased, run: Run) -> Ended:
    about = _about(leased, rows)
    own = names.of_rows(rows, index=0, total=1, command_id=about.command_id)
    ended = await run(own, about)
    names.absorb(own.ctx_patch)
    return ended


class _RowFailedError(Exception):
    def __init__(self, error: ToolError) -> None:
        super().__init__(error.message)
        self.error = error


class _Rows:
    """Runs the pipeline once a row. The first row that fails ends it, unless failures are fine."""

    def __init__(
        self,
        plan: StepPlan,
        frame: Frame,
        rows: list[Any],
        names: Names,
        leased: Leased,
        run: Run,
    ) -> None:
        self._goes_on = plan.step.spec.policy.failure.mode == "best_effort"
        self._concurrency = min(frame.row_concurrency, len(rows))
        self._rows = rows
        self._names = names
        self._leased = leased
        self._run = run
        self._results: list[Any] = [None] * len(rows)
        self._errors: dict[int, ToolError] = {}
        self._patches: dict[int, dict[str, Any]] = {}
        self._absorbed = 0

    async def run(self) -> Ended:
        todo = iter(enumerate(self._rows))
        first: ToolError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._work(todo))
        except* _RowFailedError as failed:
            first = _first_of(failed)
        self._absorb_rest()
        return Ended(error=first) if first else Ended(data=self._results, meta=self._meta())

    async def _work(self, todo: Iterator[tuple[int, Any]]) -> None:
        for position, row in todo:
            await self._run_one(position, row)

    async def _run_one(self, position: int, row: Any) -> None:
        about = _about(self._leased, row, position)
        own = self._names.of_rows(
            row, index=position, total=len(self._rows), command_id=about.command_id
        )
        ended = await self._run(own, about)
        self._patches[position] = own.ctx_patch
        self._absorb()
        if ended.error is None:
            self._results[position] = value_of(ended._replace(meta={}).document)
            return
        error = _of_row(position, ended.error)
        if not self._goes_on:
            raise _RowFailedError(error)
        self._errors[position] = error

    def _absorb(self) -> None:
        """In the order of the rows: one at a time, each sees what the rows before it have set."""
        while self._absorbed in self._patches:
            self._names.absorb(self._patches.pop(self._absorbed))
            self._absorbed += 1

    def _absorb_rest(self) -> None:
        for position in sorted(self._patches):
            self._names.absorb(self._patches[position])

    def _meta(self) -> dict[str, Any]:
        if not self._errors:
            return {}
        shown = sorted(self._errors)[:ROW_ERRORS_SHOWN_MAX]
        return {
            "rows": len(self._rows),
            "failed": len(self._errors),
            "errors": [
                {
                    "row": position,
                    "kind": self._errors[position].kind,
                    "message": self._errors[position].message,
                }
                for position in shown
            ],
        }


def _first_of(failed: BaseExceptionGroup[_RowFailedError]) -> ToolError:
    """The one that has cancelled the others; several only if they came in the same moment."""
    first, *_ = failed.exceptions
    assert isinstance(first, _RowFailedError), first
    return first.error


def _about(leased: Leased, claimed: Any, position: int | None = None) -> Leased:
    """The command as what it runs for: `load.1/3~0~9f86d081884c7d65#1` is its first row."""
    base, _, attempt = leased.command_id.rpartition("#")
    digest = hashlib.sha256(msgspec.json.encode(claimed)).hexdigest()[:_DIGEST_CHARS]
    place = "" if position is None else f"~{position}"
    return leased._replace(command_id=CommandId(f"{base}{place}~{digest}#{attempt}"))


def _of_row(position: int, error: ToolError) -> ToolError:
    return msgspec.structs.replace(
        error,
        message=f"row {position} of the frame: {error.message}",
        details={**error.details, "row": position},
    )


def _of_the_claim(error: ToolError) -> ToolError:
    return msgspec.structs.replace(error, message=f"loop.cursor: {error.message}")
