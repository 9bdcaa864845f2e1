"""Persist before emit: a result is stored, or rides with the message, before anyone hears of it."""

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import structlog

from noetl_core.blob import ReferenceNotAvailableError, ResultStore, ResultTooLargeError
from noetl_core.domain.envelope import CONTEXT_BYTES_MAX, Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import WorkerId
from noetl_core.domain.result_view import MISSING, StepDocument, plain, view_of
from noetl_core.store.command import Leased
from noetl_core.wire.messages import Done, Failed, Stored
from noetl_worker.names import Names
from noetl_worker.pipeline import Ended
from noetl_worker.plan import StepPlan
from noetl_worker.safe_errors import safe_error, without

PUT_ATTEMPTS_MAX = 3
PUT_DELAY_SECONDS = 0.2
CTX_PATCH_BYTES_MAX = 64 * 1024

_SECRET_NAME = re.compile(
    r"passw|secret|token|api_?key|auth|credential|private_?key|cookie|signature", re.IGNORECASE
)
_OK = Envelope(status="ok")

log = structlog.get_logger()


async def persist(
    store: ResultStore,
    leased: Leased,
    worker_id: WorkerId,
    plan: StepPlan,
    ended: Ended,
    names: Names,
    duration_ms: float,
) -> Done | Failed:
    """Store what a command returned and say how it ended."""
    document = _document(ended, names.secrets)
    ctx_problem = _ctx_problem(names.ctx_patch)
    error = ended.error or ctx_problem
    stored: Stored | None = None
    if document is not None:
        try:
            stored = await _put(store, leased, document)
        except (ResultTooLargeError, ReferenceNotAvailableError) as refused:
            error, document = refused.as_tool_error(), None
        except (TypeError, ValueError, msgspec.MsgspecError) as wrong:
            error, document = _not_data(wrong), None
    context = pushed_values(document, plan.pushed) if plan.pushed and stored else {}
    ctx = names.ctx_patch if ctx_problem is None else {}
    if error is None:
        return Done(
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            worker_id=worker_id,
            stored=stored,
            context=context,
            ctx=ctx,
            duration_ms=duration_ms,
        )
    return Failed(
        execution_id=leased.execution_id,
        command_id=leased.command_id,
        worker_id=worker_id,
        error=safe_error(error, names.secrets),
        stored=stored,
        context=context,
        ctx=ctx,
        duration_ms=duration_ms,
    )


def _document(ended: Ended, secrets: set[str]) -> Any:
    if not ended.task and not ended.meta:
        return ended.data
    return StepDocument(
        data=ended.data,
        task=ended.task,
        earlier=dict(ended.earlier),
        meta=without(secrets, ended.meta),
    )


async def _put(store: ResultStore, leased: Leased, document: Any) -> Stored:
    """The path follows from the command, so a second attempt overwrites the first."""
    for attempt in range(1, PUT_ATTEMPTS_MAX + 1):
        try:
            return await store.put(leased.execution_id, leased.command_id, document)
        except OSError as error:
            log.warning("result.not_stored", command_id=leased.command_id, error=str(error))
            failed = error
        await asyncio.sleep(PUT_DELAY_SECONDS * attempt)
    raise ReferenceNotAvailableError(
        f"the result could not be stored: {failed.strerror or failed}",
        execution_id=leased.execution_id,
    )


def pushed_values(document: Any, paths: Iterable[str]) -> dict[str, Any]:
    """Values that the broker routes on, as far as they are small and no secrets."""
    view = view_of(_OK, document)
    values: dict[str, Any] = {}
    room = CONTEXT_BYTES_MAX
    for path in paths:
        if not path and isinstance(document, StepDocument):
            continue  # its value is not the whole of it: its tasks and attempts would be missing
        value = _read(view, path)
        if value is MISSING or _looks_secret(path, value):
            continue
        encoded = msgspec.json.encode(value)
        size = len(encoded) + len(path) + 4
        # Postgres has no NUL in text; a value with one stays behind its reference.
        if size <= room and b"\\u0000" not in encoded:
            values[path] = value
            room -= size
    return values


def _read(view: Any, path: str) -> Any:
    """The value that a template would get at this path."""
    value = view
    for name in path.split(".") if path else ():
        try:
            value = value[name]
        except (KeyError, TypeError, IndexError):
            return MISSING
    return plain(value)


def _looks_secret(path: str, value: Any) -> bool:
    if _SECRET_NAME.search(path):
        return True
    if isinstance(value, dict):
        return any(_looks_secret(str(key), item) for key, item in value.items())
    if isinstance(value, list):
        return any(_looks_secret("", item) for item in value)
    return False


def _ctx_problem(patch: dict[str, Any]) -> ToolError | None:
    """ctx is copied into events and commands, so it must be small."""
    if not patch:
        return None
    size = len(msgspec.json.encode(patch))
    if size <= CTX_PATCH_BYTES_MAX:
        return None
    message = (
        f"the tasks set {size} bytes of ctx, more than {CTX_PATCH_BYTES_MAX}: "
        "keep the data in the result and refer to the step instead"
    )
    return ToolError(kind="ctx_too_large", message=message)


def _not_data(error: Exception) -> ToolError:
    return ToolError(kind="parse", code="NOT_JSON", message=f"the result is no plain data: {error}")
