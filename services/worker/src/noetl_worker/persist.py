"""Persist before emit: a result is stored, or rides with the message, before anyone hears of it.

What is stored is what `output.select` keeps, and routing reads the same. The payload of a child
execution and the chunks of a streamed result go the same way as a result.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import structlog

from noetl_core.blob import ReferenceNotAvailableError, ResultStore, ResultTooLargeError
from noetl_core.blob.away import StoreAwayError
from noetl_core.domain.ctx import RECORDED_BYTES_MAX, fits_a_message
from noetl_core.domain.envelope import CONTEXT_BYTES_MAX, Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import WorkerId
from noetl_core.domain.playbook import Output, Store
from noetl_core.domain.result_view import MISSING, StepDocument, plain, view_of
from noetl_core.store.command import Leased
from noetl_core.wire.messages import Done, Failed, Parked, Partial, Stored
from noetl_worker.names import Names
from noetl_worker.pipeline import Ended
from noetl_worker.plan import StepPlan
from noetl_worker.safe_errors import safe_error, without
from noetl_worker.selection import select
from noetl_worker.tools.tool import ToolFailedError, ToolParked

PUT_ATTEMPTS_MAX = 3
PUT_DELAY_SECONDS = 0.2
ITERATOR_BYTES_MAX = 4096
"""A larger iteration is known to the child execution by its number alone."""

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
    *,
    chunks: int = 0,
) -> Done | Failed:
    """Store what a command returned and say how it ended."""
    output = plan.step.output
    document = kept(output, _document(ended, names.secrets))
    ctx_problem = _ctx_problem(names.ctx_patch)
    error = ended.error or ctx_problem
    stored: Stored | None = None
    if document is not None:
        try:
            stored = await put(store, leased, leased.command_id, document, output.store)
        except ToolFailedError as refused:
            error, document = refused.error, None
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
            frame_rows=ended.frame_rows,
            chunks=chunks,
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


async def persist_parked(
    store: ResultStore,
    leased: Leased,
    worker_id: WorkerId,
    plan: StepPlan,
    parked: ToolParked,
    names: Names,
) -> Parked:
    """Store the payload of the child and say what the command waits for. Raises ToolFailedError."""
    payload: Stored | None = None
    if parked.payload:
        payload = await put(store, leased, leased.command_id, parked.payload, Store())
    return Parked(
        execution_id=leased.execution_id,
        command_id=leased.command_id,
        worker_id=worker_id,
        kind=_parked_kind(plan),
        catalog_id=parked.catalog_id,
        path=parked.path,
        version=parked.version,
        payload=payload,
        return_step=parked.return_step,
        iterator=_iteration(plan, names) if parked.catalog_id is not None else {},
        signal=parked.signal,
        until_ms=parked.until_ms,
        details=without(names.secrets, dict(parked.details)),
    )


def _parked_kind(plan: StepPlan) -> Literal["playbook", "wait", "approval"]:
    match plan.tasks[0].task.kind:
        case "playbook" | "wait" | "approval" as kind:
            return kind
        case kind:
            raise AssertionError(kind)  # the runner lets no other wait


async def persist_chunk(
    store: ResultStore,
    leased: Leased,
    worker_id: WorkerId,
    plan: StepPlan,
    document: Any,
    index: int,
) -> Partial:
    """Store a piece of a streamed result and say which it is. Raises ToolFailedError."""
    output = plan.step.output
    document = kept(output, document)
    name = f"{leased.command_id}.chunk.{index}"
    stored = await put(store, leased, name, document, output.store)
    return Partial(
        execution_id=leased.execution_id,
        command_id=leased.command_id,
        worker_id=worker_id,
        chunk_index=index,
        stored=stored,
        context=pushed_values(document, plan.pushed) if plan.pushed else {},
    )


def store_problem(output: Output, store: ResultStore) -> ToolError | None:
    """Why a result could not be kept where it must be: known before the tool does anything."""
    kind = output.store.kind
    if kind == "auto" or store.has_tier(kind):
        return None
    if kind == "pvc":
        message = "`output.store.kind: pvc` needs a directory that all see: set NOETL_STORE_DIR"
    else:
        message = f"`output.store.kind: {kind}` needs a bucket: set NOETL_S3_BUCKET"
    return ToolError(kind="not_supported", code="NO_STORE", message=message)


def kept(output: Output, document: Any) -> Any:
    """What `output.select` leaves of a result; of a pipeline's other tasks only what it names."""
    if not output.select or document is None:
        return document
    if not isinstance(document, StepDocument):
        return select(document, output.select)
    return StepDocument(
        data=select(document.data, output.select),
        task=document.task,
        earlier=_kept_earlier(document, output.select),
        meta=document.meta,
    )


def _kept_earlier(document: StepDocument, paths: Iterable[str]) -> dict[str, Any]:
    own = [path.removeprefix("results.") for path in paths if path.startswith("results.")]
    earlier: dict[str, Any] = select(document.earlier, own) if own else {}
    return earlier


def _document(ended: Ended, secrets: set[str]) -> Any:
    document = ended.document
    if isinstance(document, StepDocument) and document.meta:
        return msgspec.structs.replace(document, meta=without(secrets, document.meta))
    return document


def _iteration(plan: StepPlan, names: Names) -> dict[str, Any]:
    """`iter.parent` of the child: the iteration that calls it, as far as it is small."""
    iteration = dict(names.iterator)
    if plan.step.loop is None:
        return {}
    for large in (plan.step.loop.iterator, "parent"):
        encoded = msgspec.json.encode(iteration)
        if len(encoded) <= ITERATOR_BYTES_MAX and fits_a_message(iteration, encoded):
            break
        iteration.pop(large, None)
    return iteration


async def put(store: ResultStore, leased: Leased, name: str, document: Any, where: Store) -> Stored:
    """The name follows from the command, so a second attempt overwrites the first.

    Raises ToolFailedError.
    """
    tier = None if where.kind == "auto" else where.kind
    try:
        stored = await _put(store, leased, name, document, tier)
    except ResultTooLargeError as refused:
        raise ToolFailedError(_too_large(refused, where)) from refused
    except ReferenceNotAvailableError as refused:
        raise ToolFailedError(refused.as_tool_error()) from refused
    except (TypeError, ValueError, msgspec.MsgspecError) as wrong:
        raise ToolFailedError(_not_data(wrong)) from wrong
    return stored if where.ttl_s is None else msgspec.structs.replace(stored, ttl_s=where.ttl_s)


async def _put(
    store: ResultStore, leased: Leased, name: str, document: Any, tier: str | None
) -> Stored:
    for attempt in range(1, PUT_ATTEMPTS_MAX + 1):
        try:
            return await store.put(leased.execution_id, name, document, tier=tier)
        except (OSError, StoreAwayError) as error:
            log.warning("result.not_stored", command_id=leased.command_id, error=str(error))
            failed = error
        await asyncio.sleep(PUT_DELAY_SECONDS * attempt)
    raise ReferenceNotAvailableError(
        f"the result could not be stored: {getattr(failed, 'strerror', None) or failed}",
        execution_id=leased.execution_id,
    )


def _too_large(refused: ResultTooLargeError, where: Store) -> ToolError:
    error = refused.as_tool_error()
    if where.kind != "db":
        return error
    return msgspec.structs.replace(
        error, message=f"{error.message}, and leave out `output.store.kind: db`"
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
        # Postgres has no NUL in text, and a message no number beyond 64 bits: a value with one
        # stays behind its reference.
        if size <= room and b"\\u0000" not in encoded and fits_a_message(value, encoded):
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
    if size <= RECORDED_BYTES_MAX:
        return None
    message = (
        f"the tasks set {size} bytes of ctx, more than {RECORDED_BYTES_MAX}: "
        "keep the data in the result and refer to the step instead"
    )
    return ToolError(kind="ctx_too_large", message=message)


def _not_data(error: Exception) -> ToolError:
    return ToolError(kind="parse", code="NOT_JSON", message=f"the result is no plain data: {error}")
