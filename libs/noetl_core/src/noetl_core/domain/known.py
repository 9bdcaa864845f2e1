"""Stored values that decide() may read: loaded by the shell, asked for by ReferenceNeeded."""

from typing import Any

import msgspec

from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.ids import LoopId, RefId


class Known(msgspec.Struct):
    results: dict[RefId, Any] = {}
    parts: dict[tuple[LoopId, int], list[Any]] = {}
    loops: dict[LoopId, list[Any]] = {}

    def document(self, envelope: Envelope | None) -> Any:
        """The payload behind an envelope; None when it is void."""
        if envelope is None or envelope.reference is None:
            return None
        ref_id = envelope.reference.ref_id
        if envelope.reference.type == "eventlog":
            return self._loop(LoopId(ref_id))
        if ref_id not in self.results:
            raise ReferenceNeeded(ref_id=ref_id)
        return self.results[ref_id]

    def part(self, loop_id: LoopId, part: int) -> list[Any]:
        if (loop_id, part) not in self.parts:
            raise ReferenceNeeded(loop_id=loop_id, part=part)
        return self.parts[loop_id, part]

    def _loop(self, loop_id: LoopId) -> list[Any]:
        if loop_id not in self.loops:
            raise ReferenceNeeded(loop_id=loop_id)
        return self.loops[loop_id]
