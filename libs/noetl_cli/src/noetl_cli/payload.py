"""The payload of an execution, from `--payload FILE` and `--set key=value`."""

import math
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from noetl_cli.failure import EXIT_USAGE, CommandFailed


def build_payload(file: Path | None, assignments: Iterable[str]) -> dict[str, Any]:
    """The file's object, with every `--set` on top: `a.b=1` sets `{"a": {"b": 1}}`."""
    payload = {} if file is None else _read(file)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not key or not equals:
            raise _usage(f"--set {assignment!r} is not of the form key=value.")
        _assign(payload, key.split("."), parse_value(text), assignment)
    return payload


def parse_value(text: str) -> Any:
    """A value as YAML (and so JSON) writes it; what JSON cannot carry stays the text it is."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if not _is_json(value) else value


def _read(file: Path) -> dict[str, Any]:
    try:
        payload = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _usage(f"cannot read the payload {file}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _usage(f"the payload {file} is neither JSON nor YAML: {error}") from error
    if not isinstance(payload, dict) or not _is_json(payload):
        raise _usage(f"the payload {file} must be one object of plain JSON values.")
    return payload


def _assign(target: dict[str, Any], keys: list[str], value: Any, assignment: str) -> None:
    *parents, last = keys
    for key in parents:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise _usage(f"--set {assignment!r}: {key!r} holds a value already, not an object.")
        target = inner
    target[last] = value


def _is_json(value: Any) -> bool:
    match value:
        case dict():
            return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
        case list():
            return all(_is_json(item) for item in value)
        case float():
            return math.isfinite(value)
        case date() | bytes() | set():
            return False
        case _:
            return True


def _usage(message: str) -> CommandFailed:
    return CommandFailed(message, exit_code=EXIT_USAGE)
