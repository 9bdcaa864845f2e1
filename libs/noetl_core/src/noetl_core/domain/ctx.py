"""`ctx`: what a patch of it is, and how patches add up.

A patch maps dotted paths to values: `{"totals.users": 3}`. It is recorded in an event as jsonb,
which keeps neither the order of keys nor anything that is not JSON. So a patch is brought into a
form in which that makes no difference before it is folded: no path lies under another, and every
value is plain.
"""

import re
from typing import Any

import msgspec

RECORDED_BYTES_MAX = 64 * 1024
"""What a `set`, an arc's input or the next call may give: it is copied into events and commands, so
payloads stay out."""

_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")
_REPLACEMENT = rb"\1\\ufffd"


def merge_ctx(ctx: dict[str, Any], patch: dict[str, Any]) -> None:
    """Apply `{"a.b": 1}` to a context. Inner mappings are copied: an event may still hold them."""
    for path, value in patch.items():
        *parents, last = path.split(".")
        inner = ctx
        for name in parents:
            below = inner.get(name)
            inner[name] = dict(below) if isinstance(below, dict) else {}
            inner = inner[name]
        inner[last] = value


def compose(patch: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """One patch that does what the two do in turn, in whatever order its keys are applied."""
    composed = dict(patch)
    for path, value in later.items():
        for covered in [p for p in composed if p.startswith(f"{path}.")]:
            del composed[covered]
        above = next((p for p in composed if path.startswith(f"{p}.")), None)
        if above is None:
            composed[path] = value
        else:
            whole = {"": composed[above]}
            merge_ctx(whole, {path[len(above) :]: value})
            composed[above] = whole[""]
    return composed


def as_recorded(value: Any) -> Any:
    """The value as it will be read back from the log: JSON, and no character that Postgres refuses.

    Raises TypeError or ValueError for what JSON cannot say, and for a number that JSON alone can:
    what is recorded goes into commands and messages later.
    """
    body = msgspec.json.encode(value)
    if not fits_a_message(value, body):
        raise ValueError("a number in it is beyond 64 bits: make it text, or a float")
    if b"\\u0000" in body:
        body = _NUL.sub(_REPLACEMENT, body)
    return msgspec.json.decode(body)


def fits_a_message(value: Any, body: bytes) -> bool:
    """Whether a message can hold what JSON can. `body` is the value in JSON."""
    if not _LONG_NUMBER.search(body):
        return True
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True
