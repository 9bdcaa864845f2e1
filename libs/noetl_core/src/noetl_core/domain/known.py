"""Stored values that decide() may read: loaded by the shell, asked for by ReferenceNeeded."""

from typing import Any

import msgspec

from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.ids import LoopId, RefId, WorkerId
from noetl_core.domain.workers import NOBODY, Workers


class Known(msgspec.Struct):
    results: dict[RefId, Any] = {}
    pages: dict[RefId, Any] = {}
    """What sequences of pages collected. A sequence has the id of its first page's result."""
    parts: dict[tuple[LoopId, int], list[Any]] = {}
    loops: dict[LoopId, list[Any]] = {}
    """Results of loops, in the order of their items."""
    undone: dict[LoopId, list[int]] = {}
    """By activation of a loop: the items that have not ended well."""
    workers: Workers = NOBODY
    """Who could take a command that is issued now."""
    previous: WorkerId | None = None
    """The worker whose result is being followed up."""

    def document(self, envelope: Envelope | None) -> Any:
        """The payload behind an envelope; None when it is void."""
        if envelope is None or envelope.reference is None:
            return None
        reference = envelope.reference
        if reference.type == "eventlog":
            loop_id = LoopId(reference.ref_id)
            if loop_id not in self.loops:
                raise ReferenceNeeded(reference)
            return self.loops[loop_id]
        documents = self.pages if reference.type == "pages" else self.results
        if reference.ref_id not in documents:
            raise ReferenceNeeded(reference)
        return documents[reference.ref_id]

    def part(self, loop_id: LoopId, part: int) -> list[Any]:
        if (loop_id, part) not in self.parts:
            raise ReferenceNeeded(loop_id=loop_id, part=part)
        return self.parts[loop_id, part]

    def left_undone(self, loop_id: LoopId) -> list[int]:
        if loop_id not in self.undone:
            raise ReferenceNeeded(loop_id=loop_id)
        return self.undone[loop_id]
