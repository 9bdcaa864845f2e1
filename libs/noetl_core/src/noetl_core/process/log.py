"""Logs: a constant and fields per line, as JSON for machines or coloured for a terminal."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def set_up_logs(*, level: str, log_format: str) -> None:
    """Route our lines and those of the libraries to stderr, in one shape."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _ids_as_text,
    ]
    ending: list[structlog.types.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if log_format == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    _adopt_libraries(shared, ending)


def _adopt_libraries(
    shared: list[structlog.types.Processor], ending: list[structlog.types.Processor]
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # A Postgres that is away is told by our loops; the pool would add a traceback to every try.
    logging.getLogger("asyncpg").setLevel(logging.ERROR)


def _ids_as_text(
    _logger: Any, _method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A snowflake has more digits than a JSON number may have: readers would round it."""
    for key, value in line.items():
        if type(value) is int and abs(value) > 2**53:
            line[key] = str(value)
    return line
