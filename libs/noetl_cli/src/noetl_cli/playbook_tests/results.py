"""Documents by reference, as the result store would give them back: results, loops, pages."""

from typing import Any

from noetl_core.domain.brief import Brief
from noetl_core.domain.decide import Recorded
from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.events import CallDone, LoopDone, LoopStarted, RetryCompleted
from noetl_core.domain.ids import EventId, LoopId, RefId
from noetl_core.domain.known import Known
from noetl_core.domain.loop import split
from noetl_core.domain.pages import PageRule, collected
from noetl_core.domain.result_view import value_of


class Results:
    """`known` is what the broker's decisions have at hand of it."""

    def __init__(self) -> None:
        self.known = Known()
        self._documents: dict[RefId, Any] = {}
        self._pages: dict[EventId, list[Any]] = {}
        self._collected: dict[RefId, Any] = {}
        self._iterations: dict[LoopId, dict[int, Any]] = {}
        self._totals: dict[LoopId, int] = {}

    def keep(self, ref_id: RefId, document: Any) -> None:
        self._documents[ref_id] = document

    def record(self, item: Recorded, *, has_pages: bool) -> None:
        event_id = item.event.event_id
        match item.event.fact:
            case LoopStarted() as fact:
                for number, part in enumerate(split(item.collection or [], fact.part_size)):
                    self.known.parts[LoopId(event_id), number] = part
            case CallDone() as fact if has_pages:
                document = self._documents.get(RefId(event_id))
                self._pages.setdefault(fact.sequence or event_id, []).append(document)
            case CallDone(loop_id=int() as loop_id, iter_index=int() as index):
                if RefId(event_id) in self._documents:
                    value = value_of(self._documents[RefId(event_id)])
                    self._iterations.setdefault(LoopId(loop_id), {})[index] = value
            case RetryCompleted() as fact:
                self._collect(fact)
            case LoopDone() as fact:
                self._totals[fact.loop_id] = fact.total
            case _:
                pass

    def _collect(self, fact: RetryCompleted) -> None:
        value = collected(PageRule(fact.collect, fact.merge_path), self._pages[fact.sequence])
        self._collected[RefId(fact.sequence)] = value
        if fact.loop_id is not None and fact.iter_index is not None:
            self._iterations.setdefault(fact.loop_id, {})[fact.iter_index] = value

    def document(self, reference: Reference) -> Any:
        match reference.type:
            case "eventlog":
                return self._loop(LoopId(reference.ref_id))
            case "pages":
                return self._collected[reference.ref_id]
            case _:
                return self._documents[reference.ref_id]

    def _loop(self, loop_id: LoopId) -> list[Any]:
        found = self._iterations.get(loop_id, {})
        total = max(self._totals.get(loop_id, 0), *(index + 1 for index in found), 0)
        return [found.get(index) for index in range(total)]

    def load(self, needed: ReferenceNeeded) -> None:
        reference = needed.reference
        assert reference is not None, needed
        document = self.document(reference)
        match reference.type:
            case "eventlog":
                self.known.loops[LoopId(reference.ref_id)] = document
            case "pages":
                self.known.pages[reference.ref_id] = document
            case _:
                self.known.results[reference.ref_id] = document

    def element(self, brief: Brief) -> Any:
        where = brief.element
        if where is None or where.is_inline:
            return None if where is None else where.value
        return self.known.parts[where.loop_id, where.part][where.offset]
