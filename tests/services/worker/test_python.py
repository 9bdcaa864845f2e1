"""Users' code in child processes: what it gets, what it gives, what it cannot do to the worker."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from noetl_worker.children.pool import ChildPool
from noetl_worker.tools.python import PythonTool
from services.worker import calls


@pytest.fixture
async def children() -> AsyncIterator[ChildPool]:
    pool = ChildPool(size=1, memory_mb=1024, cpu_seconds=60)
    yield pool
    await pool.close()


@pytest.fixture
def tool(children: ChildPool) -> PythonTool:
    return PythonTool(children)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("result = 1 + 1", 2),
        ("x = 1", None),
        ("return {'a': [1, 2]}", {"a": [1, 2]}),
        ("if a > 1:\n    return 'big'\nreturn 'small'", "big"),
        ("total = a\nfor i in range(3):\n    total += i\nreturn total", 5),
        ("def main(a, b=5):\n    return a + b", 7),
        ("def main(a, **rest):\n    return [a, rest]", [2, {"c": "x"}]),
        ("def main(input):\n    return input['a']", 2),
        ("async def main(a):\n    return a", 2),
        ("def main():\n    pass\nresult = 'set'", "set"),
        ("def f():\n    return 1\nresult = f()", 1),
        ("import datetime\nresult = datetime.date(2024, 1, 2)", "2024-01-02"),
        ("result = {1, 2} and (1, 2)", [1, 2]),
        ("result = (n for n in range(3))", [0, 1, 2]),
        ("result = [input['c'], c, row]", ["x", "x", {"id": 1}]),
    ],
)
async def test_code_gives(tool: PythonTool, code: str, value: Any) -> None:
    found = await calls.data(
        tool, config={"code": code}, given={"a": 2, "c": "x"}, names={"row": {"id": 1}}
    )

    assert found == value


async def test_an_exception_shows_the_lines_of_the_users_code(tool: PythonTool) -> None:
    code = "def deep(n):\n    return 1 / n\n\ndef main():\n    return deep(0)"

    failed = await calls.error(tool, config={"code": code})

    assert (failed.kind, failed.code) == ("python_error", "ZeroDivisionError")
    assert failed.details["py"]["exception"] == "ZeroDivisionError"
    assert failed.details["py"]["traceback"] == [
        "line 5, in main: return deep(0)",
        "line 2, in deep: return 1 / n",
    ]


async def test_a_syntax_error_names_its_line(tool: PythonTool) -> None:
    failed = await calls.error(tool, config={"code": "x = 1\ny = = 2"})

    assert failed.code == "SyntaxError"
    assert failed.details["py"]["traceback"] == ["line 2, in <module>: y = = 2"]


async def test_a_parameter_that_nobody_bound_is_said(tool: PythonTool) -> None:
    failed = await calls.error(tool, config={"code": "def main(rows): pass"}, given={"row": 1})

    assert failed.code == "WRONG_CODE"
    assert "'rows'" in failed.message
    assert "bind it in `input`" in failed.message


async def test_a_result_that_is_no_data_is_said(tool: PythonTool) -> None:
    failed = await calls.error(tool, config={"code": "result = {'x': object()}"})

    assert "has no JSON form" in failed.message


async def test_what_is_printed_is_kept_apart_from_the_result(tool: PythonTool) -> None:
    code = "import sys\nprint('hello')\nprint('oh', file=sys.stderr)\nresult = 1"

    result = await calls.run(tool, config={"code": code})

    assert result.data == 1
    assert result.meta == {"stdout": "hello\n", "stderr": "oh\n"}


async def test_endless_printing_is_cut(tool: PythonTool) -> None:
    result = await calls.run(tool, config={"code": "for _ in range(100000): print('x' * 100)"})

    assert len(result.meta["stdout"]) < 70_000
    assert "more characters" in result.meta["stdout"]


async def test_writing_to_the_pipe_itself_spoils_nothing(tool: PythonTool) -> None:
    code = (
        "import os, subprocess\nos.write(1, b'x' * 99)\nsubprocess.run(['echo', 'hi'])\nresult = 1"
    )

    assert await calls.data(tool, config={"code": code}) == 1
    assert await calls.data(tool, config={"code": "result = 2"}) == 2


async def test_an_endless_loop_is_killed_and_the_next_call_works(tool: PythonTool) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await calls.run(tool, config={"code": "while True: pass"})

    assert await calls.data(tool, config={"code": "result = 'alive'"}) == "alive"
    assert time.monotonic() - started < 30


async def test_what_the_code_started_dies_with_it(tool: PythonTool) -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '61.5'])\nwhile True: pass"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await calls.run(tool, config={"code": code})

    async with asyncio.timeout(30):  # half of what it would sleep
        while is_running("61.5"):  # noqa: ASYNC110 - a process tells nobody that it died
            await asyncio.sleep(0.05)


def is_running(word: str) -> bool:
    return any(word in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize(
    "code", ["import os; os._exit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
)
async def test_a_dead_child_loses_only_its_own_call(tool: PythonTool, code: str) -> None:
    failed = await calls.error(tool, config={"code": code})

    assert failed.kind == "process_died"
    assert failed.retryable
    assert await calls.data(tool, config={"code": "result = 1"}) == 1


async def test_exit_is_an_error_and_not_the_end(tool: PythonTool) -> None:
    pid = "import os; result = os.getpid()"
    before = await calls.data(tool, config={"code": pid})

    failed = await calls.error(tool, config={"code": "import sys; sys.exit(2)"})

    assert failed.code == "SystemExit"
    assert await calls.data(tool, config={"code": pid}) == before


async def test_a_child_is_kept_warm_and_is_another_process(tool: PythonTool) -> None:
    pids = [
        await calls.data(tool, config={"code": "import os; result = os.getpid()"}) for _ in range(3)
    ]

    assert len(set(pids)) == 1
    assert pids[0] != os.getpid()


async def test_calls_do_not_see_each_others_variables(tool: PythonTool) -> None:
    await calls.data(tool, config={"code": "left = 1"})

    failed = await calls.error(tool, config={"code": "result = left"})

    assert failed.code == "NameError"


async def test_the_environment_holds_no_secret(
    tool: PythonTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOETL_POSTGRES_DSN", "postgresql://u:hunter2@h/d")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("HTTPS_PROXY", "http://u:hunter2@proxy")

    found = await calls.data(tool, config={"code": "import os; result = dict(os.environ)"})

    assert "hunter2" not in str(found)


async def test_memory_is_bounded(tool: PythonTool) -> None:
    failed = await calls.error(tool, config={"code": "x = bytearray(4 * 1024**3)"})

    assert failed.code == "MemoryError"
    assert await calls.data(tool, config={"code": "result = 1"}) == 1


async def test_processor_time_is_bounded() -> None:
    pool = ChildPool(size=1, memory_mb=0, cpu_seconds=1)
    try:
        failed = await calls.error(PythonTool(pool), config={"code": "while True: pass"})
    finally:
        await pool.close()

    assert failed.kind == "process_died"


async def test_libraries_come_by_their_alias(tool: PythonTool) -> None:
    found = await calls.data(tool, config={"code": "result = j.dumps([1])", "libs": {"j": "json"}})
    missing = await calls.error(tool, config={"code": "1", "libs": ["not_there_at_all"]})

    assert found == "[1]"
    assert "not_there_at_all" in missing.message


async def test_more_calls_than_children_wait_their_turn(children: ChildPool) -> None:
    tool = PythonTool(children)
    code = "import time; time.sleep(0.05); result = a"

    found = await asyncio.gather(
        *(calls.data(tool, config={"code": code}, given={"a": n}) for n in range(6))
    )

    assert found == list(range(6))
    assert children.waiting == 0
