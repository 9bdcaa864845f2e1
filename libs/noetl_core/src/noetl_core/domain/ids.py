"""The identifiers of the system, each its own type, and the readable id of a command."""

import re
from typing import NamedTuple, NewType

ExecutionId = NewType("ExecutionId", int)
EventId = NewType("EventId", int)
CatalogId = NewType("CatalogId", int)
LoopId = NewType("LoopId", int)
RefId = NewType("RefId", int)
RuntimeId = NewType("RuntimeId", int)
EpochId = NewType("EpochId", int)
ShardId = NewType("ShardId", int)
VnodeId = NewType("VnodeId", int)
WorkerId = NewType("WorkerId", str)
StepName = NewType("StepName", str)
CommandId = NewType("CommandId", str)
VisitId = NewType("VisitId", str)

ID_MAX = (1 << 63) - 1

_NO_TOKEN = re.compile(r"[^\w-]")
_COMMAND = re.compile(
    r"(?P<step>.+)\.(?P<visit>\d+)(?:/(?P<index>\d+))?(?:@(?P<page>\d+))?#(?P<attempt>\d+)"
)


def worker_id_of(instance: str) -> WorkerId:
    """The name of a worker's process as one token of a NATS subject."""
    return WorkerId(_NO_TOKEN.sub("-", instance))


class CommandParts(NamedTuple):
    step: StepName
    visit: int
    iter_index: int | None
    page: int
    attempt: int


def visit_id(step: str, visit: int) -> VisitId:
    """`load.2`: the second time the step `load` is entered."""
    return VisitId(f"{step}.{visit}")


def command_id(
    step: str, visit: int, *, index: int | None, attempt: int, page: int = 1
) -> CommandId:
    """`load.1/17@3#2`: second attempt at the third page of item 17 of the first visit.

    Without its attempt it is the idempotency key. The first page is not written out.
    """
    iteration = "" if index is None else f"/{index}"
    turned = "" if page == 1 else f"@{page}"
    return CommandId(f"{step}.{visit}{iteration}{turned}#{attempt}")


def parse_command_id(text: str) -> CommandParts:
    match = _COMMAND.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a command id such as 'load.1/17#2' or 'load.1@3#1'")
    index = match["index"]
    return CommandParts(
        step=StepName(match["step"]),
        visit=int(match["visit"]),
        iter_index=None if index is None else int(index),
        page=int(match["page"] or 1),
        attempt=int(match["attempt"]),
    )
