"""Reads a playbook file and checks it, without any NoETL running."""

from pathlib import Path
from typing import NamedTuple

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_core.domain.errors import PlaybookInvalidError
from noetl_core.domain.parse import format_problem, parse_playbook, warnings_of
from noetl_core.domain.playbook import Playbook


class Checked(NamedTuple):
    """The text of a playbook that can run, and what may be wrong with it all the same."""

    content: str
    warnings: list[str]


class Parsed(NamedTuple):
    content: str
    playbook: Playbook


def read_playbook(file: Path) -> Checked:
    """Ends the command with every problem of a playbook that cannot run."""
    content, playbook = parse_file(file)
    warnings = [format_problem(problem, str(file), content) for problem in warnings_of(playbook)]
    return Checked(content, warnings)


def parse_file(file: Path) -> Parsed:
    """Ends the command with every problem of a playbook that cannot run."""
    content = read_text(file)
    try:
        return Parsed(content, parse_playbook(content, file=str(file)))
    except PlaybookInvalidError as error:
        lines = [format_problem(problem, str(file), content) for problem in error.problems]
        raise CommandFailed("\n".join(lines), exit_code=EXIT_USAGE) from error


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandFailed(
            f"cannot read {file}: {error.strerror}.", exit_code=EXIT_USAGE
        ) from error
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{file} is not UTF-8 text.", exit_code=EXIT_USAGE) from error
