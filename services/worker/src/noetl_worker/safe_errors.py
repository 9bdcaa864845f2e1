"""Errors as they may leave this process: bounded, without secrets, and fit for the log."""

from collections.abc import Collection
from typing import Any

import msgspec

from noetl_core.domain.errors import ToolError

MESSAGE_CHARS_MAX = 2000
DETAILS_BYTES_MAX = 4096
SECRET_CHARS_MIN = 4
"""Shorter ones are not looked for: half of every text would be taken for a secret."""

_HIDDEN = "***"


def safe_error(error: ToolError, secrets: Collection[str]) -> ToolError:
    return ToolError(
        kind=error.kind,
        code=error.code,
        retryable=error.retryable,
        message=without(secrets, error.message)[:MESSAGE_CHARS_MAX],
        details=_bounded(without(secrets, error.details)),
    )


def as_text(text: str) -> str:
    """Text that can be sent and recorded: half a character (a lone surrogate) can neither, and
    Postgres has no NUL. One in an error would keep the error from being heard of."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return text.replace("\x00", "")


def without(secrets: Collection[str], value: Any) -> Any:
    """Plain data with every secret in its texts blotted out."""
    return _safe(value, [secret for secret in secrets if len(secret) >= SECRET_CHARS_MIN])


def _safe(value: Any, hidden: list[str]) -> Any:
    if isinstance(value, str):
        text = as_text(value)
        for secret in hidden:
            text = text.replace(secret, _HIDDEN)
        return text
    if isinstance(value, dict):
        return {str(key): _safe(item, hidden) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(item, hidden) for item in value]
    # A number that no message can hold is worth more as text than the error without it.
    return str(value) if isinstance(value, int) and not is_number(value) else value


def is_number(value: int) -> bool:
    """Whether a message can hold it; JSON alone could."""
    return -(2**63) <= value < 2**64


def _bounded(details: dict[str, Any]) -> dict[str, Any]:
    """Without its largest parts, until it fits: an event is no place for payloads."""
    kept = dict(details)
    while kept and _size(kept) > DETAILS_BYTES_MAX:
        del kept[max(kept, key=lambda name: _size(kept[name]))]
    return kept


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value, enc_hook=str))
