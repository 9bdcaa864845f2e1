"""The names of a trace: one trace an execution, and whoever knows what happened knows its ids.

    execution ── step visit ── command

They are made from the names of what happened, so no service has to hand a context to another, a
message that is lost loses none, and what is told twice is the same span.
"""

from hashlib import blake2b

from noetl_core.domain.ids import CommandId, ExecutionId, VisitId


def trace_id(execution_id: ExecutionId) -> int:
    return _hash(f"execution {execution_id}", size=16)


def execution_span(execution_id: ExecutionId) -> int:
    """The root: everything else is below it."""
    return _hash(f"{execution_id} execution", size=8)


def visit_span(execution_id: ExecutionId, visit: VisitId) -> int:
    return _hash(f"{execution_id} visit {visit}", size=8)


def command_span(execution_id: ExecutionId, command_id: CommandId) -> int:
    """Of one attempt: the next attempt is another span beside it."""
    return _hash(f"{execution_id} command {command_id}", size=8)


def _hash(text: str, *, size: int) -> int:
    # Zero would mean that there is no span.
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest(), "big") or 1
