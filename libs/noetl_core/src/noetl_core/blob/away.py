"""The error of a directory or a bucket that cannot be reached."""

from noetl_core.domain.errors import RetryableError


class StoreAwayError(RetryableError):
    """A place does not answer, or refuses us. What is in it is not known: the same call may succeed
    later, and nothing may be concluded from this one.
    """


class StoreRefusedError(StoreAwayError):
    """It answers, and does not let us: that does not pass by itself, somebody must mend it."""
