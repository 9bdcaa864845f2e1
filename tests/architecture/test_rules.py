"""Rules of the code that no linter knows. The import contracts are in pyproject.toml."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70

_SQL = re.compile(r"\b(SELECT\b.+\bFROM|INSERT INTO|UPDATE|DELETE FROM)\s+noetl\.", re.DOTALL)
_SUBJECT_ROOT = re.compile(r"^noetl\.[a-z]+\b", re.MULTILINE)
_SUBJECTS = ROOT / "libs" / "noetl_core" / "src" / "noetl_core" / "wire" / "subjects.py"
_PORT_OF_SOMEBODY = re.compile(r"(127\.0\.0\.1|localhost)(:|[\"'], )[1-9]")
_LOGGED_FSTRING = re.compile(r"\blog\.(debug|info|warning|error|exception)\(\s*f[\"']")


def sources() -> Iterator[Path]:
    for folder in ("libs", "services"):
        yield from sorted((ROOT / folder).glob("*/src/**/*.py"))


def strings_of(path: Path) -> Iterator[str]:
    """Every string of a module but its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node.value


def test_only_the_store_speaks_sql_to_our_tables() -> None:
    elsewhere = [
        str(path.relative_to(ROOT))
        for path in sources()
        if "noetl_core/store/" not in path.as_posix()
        and "noetl_cli/bench/" not in path.as_posix()
        and any(_SQL.search(text) for text in strings_of(path))
    ]
    assert elsewhere == []


def test_a_subject_is_spelled_in_the_wire_only() -> None:
    elsewhere = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path != _SUBJECTS and subjects_begun_in(path) & subjects_documented()
    ]
    assert elsewhere == []


def test_every_subject_is_one_of_the_page() -> None:
    assert subjects_begun_in(_SUBJECTS) == subjects_documented()


def subjects_begun_in(path: Path) -> set[str]:
    """noetl.events of "noetl.events.{shard}.batch", for one."""
    found = (_SUBJECT_ROOT.match(text) for text in strings_of(path))
    return {match.group() for match in found if match}


def subjects_documented() -> set[str]:
    return set(_SUBJECT_ROOT.findall(ast.get_docstring(ast.parse(_SUBJECTS.read_text())) or ""))


def test_no_function_is_longer_than_seventy_lines() -> None:
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {lines}")
    assert long == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.name != "__main__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_the_environment_is_read_in_one_place() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in sources()
        if "noetl_cli/" not in path.as_posix()
        and not path.as_posix().endswith(
            # The last one builds the bare environment of a child.
            ("process/service.py", "process/config.py", "children/pool.py")
        )
        and re.search(r"os\.(environ|getenv)", path.read_text())
    ]
    assert readers == []


def test_a_log_line_is_a_constant_and_fields() -> None:
    formatted = [
        str(path.relative_to(ROOT))
        for path in sources()
        if _LOGGED_FSTRING.search(path.read_text())
    ]
    assert formatted == []


def test_a_service_has_the_shape_of_a_service() -> None:
    incomplete = [
        f"{package.name}/{name}"
        for package in sorted((ROOT / "services").glob("*/src/noetl_*"))
        for name in ("__main__.py", "main.py", "config.py", "metrics.py")
        if not (package / name).exists()
    ]
    assert incomplete == []


def test_no_helper_of_tests_assumes_on_which_port_anybody_listens() -> None:
    """It is told, or asks `free_port`."""
    assuming = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if not path.name.startswith("test_") and _PORT_OF_SOMEBODY.search(path.read_text())
    ]
    assert assuming == []
