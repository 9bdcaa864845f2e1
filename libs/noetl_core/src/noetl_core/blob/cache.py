"""Documents that were read, the least recently used one leaving first, within a bound in bytes."""

import sys
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

NEVER_CACHED = sys.maxsize
"""The size of a document that may be gone tomorrow, so that it is asked for every time."""
_OVERHEAD_BYTES = 256


class _Entry(NamedTuple):
    document: Any
    bytes: int


class DocumentCache:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, default: Any) -> Any:
        entry = self._entries.get(key)
        if entry is None:
            return default
        self._entries.move_to_end(key)
        return entry.document

    def put(self, key: Hashable, document: Any, encoded_bytes: int) -> None:
        size = encoded_bytes + _OVERHEAD_BYTES
        if size > self._bytes_max:
            return
        self._drop(key)
        self._entries[key] = _Entry(document, size)
        self._bytes += size
        while self._bytes > self._bytes_max:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.bytes
