"""Reads a playbook file and checks it, without any NoETL running."""

from pathlib import Path

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_core.domain.errors import PlaybookInvalidError, Problem
from noetl_core.domain.parse import parse_playbook


def read_playbook(file: Path) -> str:
    """The text of a playbook that can run; else the command ends with every problem it has."""
    try:
        content = file.read_text(encoding="utf-8")
        parse_playbook(content)
    except OSError as error:
        raise CommandFailed(
            f"cannot read {file}: {error.strerror}.", exit_code=EXIT_USAGE
        ) from error
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{file} is not UTF-8 text.", exit_code=EXIT_USAGE) from error
    except PlaybookInvalidError as error:
        lines = (problem_line(problem, str(file)) for problem in error.problems)
        raise CommandFailed("\n".join(lines), exit_code=EXIT_USAGE) from error
    return content


def problem_line(problem: Problem, file: str) -> str:
    """`bad.yaml:7:5: unknown key 'tol' (did you mean 'tool'?)`."""
    hint = f" ({problem.hint})" if problem.hint else ""
    return f"{file}:{problem.line}:{problem.column}: {problem.message}{hint}"
