"""Runs users' Python in a process of its own, call after call. Started by file, not imported.

    parent ── length, msgpack {code, names, input, libs, ...} ──> child
    parent <── length, msgpack {value | error, stdout, stderr} ── child

It imports next to nothing, so that a fresh one is there in a moment. The pipes of the protocol are
moved out of the way of the user's code: what that prints is captured, and nothing it writes can be
mistaken for an answer.
"""

import ast
import builtins
import importlib
import inspect
import io
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any, BinaryIO

import msgspec

OUTPUT_CHARS_MAX = 64 * 1024
TRACEBACK_LINES_MAX = 20
MESSAGE_CHARS_MAX = 4000
_RETURN = "__noetl_return__"
_FILE = "<code>"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Captured(io.TextIOBase):
    """What was printed, up to a limit; the rest is counted, not kept."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0

    def write(self, text: str) -> int:
        room = OUTPUT_CHARS_MAX - self._length
        if room > 0:
            self._pieces.append(text[:room])
        self._length += len(text)
        return len(text)

    def writable(self) -> bool:
        return True

    @property
    def text(self) -> str:
        lost = self._length - OUTPUT_CHARS_MAX
        ending = f"\n... {lost} more characters" if lost > 0 else ""
        return "".join(self._pieces) + ending


class UserError(Exception):
    """The code cannot be run as it stands; the message is for its author."""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    while (body := _read(requests)) is not None:
        answer = _encode(handle(_decode(body)))
        answers.write(struct.pack(">I", len(answer)) + answer)
        answers.flush()


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """One call. Whatever the code does short of killing the process becomes an answer."""
    stdout, stderr = Captured(), Captured()
    sys.stdout, sys.stderr = stdout, stderr
    _allow_cpu(request.get("cpu_seconds") or 0)
    try:
        value = run(request["code"], request["names"], request["input"], request.get("libs"))
        answer: dict[str, Any] = {"value": msgspec.json.encode(value, enc_hook=_plain)}
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are the code's too
        answer = {"error": _describe(error, request["code"])}
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return answer | {"stdout": _whole(stdout.text), "stderr": _whole(stderr.text)}


def run(code: str, names: dict[str, Any], given: dict[str, Any], libs: Any) -> Any:
    """The value of a top-level return, of `main(...)`, or of the variable `result`."""
    scope: dict[str, Any] = {"__name__": "__noetl__", "__builtins__": builtins, **names}
    scope["input"] = given
    scope.update(_imported(libs))
    exec(_compiled(code), scope)  # noqa: S102 - this process exists to do that
    if _RETURN in scope:
        return _awaited(scope[_RETURN]())
    main = scope.get("main")
    if callable(main) and main is not names.get("main"):
        value = _awaited(main(**_arguments(main, {**names, "input": given}, given)))
        return scope.get("result") if value is None else value
    return scope.get("result")


@lru_cache(maxsize=128)
def _compiled(code: str) -> CodeType:
    tree = ast.parse(code, _FILE)
    if any(isinstance(node, ast.Return) for node in _own_nodes(tree)):
        tree = _as_function(tree)
    return compile(tree, _FILE, "exec")


def _own_nodes(tree: ast.AST) -> Iterable[ast.AST]:
    """Everything that is not inside a function or a class."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            yield from _own_nodes(node)


def _as_function(tree: ast.Module) -> ast.Module:
    """Code with a top-level return as the body of a function, its assignments kept global."""
    function = ast.parse(f"def {_RETURN}(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    stored = sorted(
        {
            name.id
            for name in _own_nodes(tree)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
    )
    shared: list[ast.stmt] = [ast.Global(stored)] if stored else []
    function.body = shared + tree.body
    return ast.fix_missing_locations(ast.Module([function], []))


def _imported(libs: Any) -> dict[str, Any]:
    """`libs: {pd: pandas}` or `libs: [json]`: modules the code uses without importing them."""
    aliases = libs if isinstance(libs, Mapping) else {str(n).split(".")[0]: n for n in libs or ()}
    found = {}
    for alias, name in aliases.items():
        try:
            module = importlib.import_module(str(name))
        except ImportError as error:
            raise UserError(f"the library {name!r} is not there: {error}") from error
        found[str(alias)] = module if isinstance(libs, Mapping) else sys.modules[str(alias)]
    return found


def _arguments(
    main: Callable[..., Any], names: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(main).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= {key: value for key, value in given.items() if key not in arguments}
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"main() takes {name!r} by position only; name its parameters")
        elif name in names:
            arguments[name] = names[name]
        elif parameter.default is parameter.empty:
            known = ", ".join(sorted(names)) or "nothing"
            raise UserError(f"main() needs {name!r}: bind it in `input` (there is: {known})")
    return arguments


def _awaited(value: Any) -> Any:
    if not inspect.iscoroutine(value):
        return value
    import asyncio  # noqa: PLC0415 - as long as everything else takes together, and seldom needed

    return asyncio.run(value)


def _plain(value: Any) -> Any:
    """What other libraries use for plain data: arrays, frames, lazy sequences."""
    for method in ("to_dict", "tolist", "isoformat"):
        convert = getattr(value, method, None)
        if callable(convert):
            return convert()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"the result holds a {type(value).__name__}, which has no JSON form")


def _describe(error: BaseException, code: str) -> dict[str, Any]:
    name = "UserError" if isinstance(error, UserError) else _whole(type(error).__name__)
    return {
        "exception": name,
        "message": _text(error)[:MESSAGE_CHARS_MAX] or name,
        "traceback": _lines(error, code.splitlines()),
    }


def _text(error: BaseException) -> str:
    """What it says; its class is the user's, too, and may fail at that."""
    try:
        return _whole(str(error))
    except Exception:  # noqa: BLE001 - an error that cannot be told is told by its name
        return ""


def _whole(text: str) -> str:
    """Without half characters, such as a file name may have: nothing can send them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _lines(error: BaseException, source: list[str]) -> list[str]:
    """Where in the user's code it happened; our own frames are nobody's business."""
    if isinstance(error, SyntaxError) and error.filename == _FILE:
        numbers = [(error.lineno or 1, "<module>")]
    else:
        frames = traceback.extract_tb(error.__traceback__)
        numbers = [(f.lineno or 1, f.name) for f in frames if f.filename == _FILE]
    return [
        f"line {number}, in {'<module>' if name == _RETURN else name}: "
        + (source[number - 1].strip() if 0 < number <= len(source) else "")
        for number, name in numbers[-TRACEBACK_LINES_MAX:]
    ]


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(4)
    if len(head) < 4:  # noqa: PLR2004 - the parent is gone
        return None
    return stream.read(struct.unpack(">I", head)[0])


def _allow_cpu(seconds: int) -> None:
    """The limit counts over the life of a process, so each call gets what it may use on top."""
    if seconds:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = int(used.ru_utime + used.ru_stime) + seconds + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (until, hard))


def _limit_memory(megabytes: int) -> None:
    if megabytes:
        size = megabytes * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _die_with_parent() -> None:
    """A worker that is killed must not leave a runaway loop behind. Elsewhere the pipe ends."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - half the import time of this file, and not needed elsewhere

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit(1)


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol away from 0 and 1, and leave nothing there to read or to spoil."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    return requests, answers


if __name__ == "__main__":
    _die_with_parent()
    # Ctrl-C in a terminal goes to every process of it; the worker decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(int(sys.argv[1]))
    serve(*_private_pipes())
