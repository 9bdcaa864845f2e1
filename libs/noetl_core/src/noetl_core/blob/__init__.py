"""Where results are kept: the store of documents and the tiers behind it."""

from noetl_core.blob.result_store import Resolved, ResultStore, document_of
from noetl_core.blob.tier import ReferenceNotAvailableError, ResultTooLargeError, Tier

__all__ = [
    "ReferenceNotAvailableError",
    "Resolved",
    "ResultStore",
    "ResultTooLargeError",
    "Tier",
    "document_of",
]
