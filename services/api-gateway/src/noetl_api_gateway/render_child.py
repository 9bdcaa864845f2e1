"""The child of rendering.py: reads a template, answers with its value, until its input ends."""

import resource
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

from noetl_api_gateway.rendering import HEADER, Outcome
from noetl_core.domain.errors import TemplateError
from noetl_core.domain.scope import Scope
from noetl_core.domain.template import render
from noetl_core.wire.http import RenderRequest

MEMORY_BYTES_MAX = 1024 * 1024 * 1024

_LAYERS = ("workload", "ctx", "input")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (asked := _read(sys.stdin.buffer)) is not None:
        answer = msgspec.json.encode(_outcome(asked))
        sys.stdout.buffer.write(HEADER.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


def names_of(context: Mapping[str, Any]) -> Scope:
    """The names as a worker has them: `ctx.x` can be read as `x`, and so on, in the same order."""
    layers = {name: context[name] for name in _LAYERS if isinstance(context.get(name), dict)}
    iterator = context.get("iter")
    roots = {name: value for name, value in context.items() if name not in {*layers, "iter"}}
    if isinstance(iterator, dict):
        layers["iterator"] = iterator
    elif "iter" in context:
        roots["iter"] = iterator
    return Scope(**layers, roots=roots)


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return stream.read(HEADER.unpack(header)[0])


def _outcome(message: bytes) -> Outcome:
    asked = msgspec.json.decode(message, type=RenderRequest)
    try:
        value = render(asked.template, names_of(asked.context), step="", field="template")
        return Outcome(value=msgspec.Raw(msgspec.json.encode(value, enc_hook=_plain)))
    except TemplateError as error:
        return Outcome(reason=error.reason, field=error.field, name=error.name)
    except MemoryError:
        return Outcome(reason="it needs too much memory", field="template")
    except (TypeError, ValueError, RecursionError) as error:
        return Outcome(reason=f"its value has no JSON form: {error}", field="template")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no data")


if __name__ == "__main__":
    main()
