"""The options of `noetl render`, and what it prints."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import typer
import yaml

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.payload import build_payload
from noetl_cli.preview import Given, Preview
from noetl_cli.terminal import print_json, say
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.reader import suggestion


def named_step(playbook: Playbook, step: str, file: str) -> None:
    if step not in playbook.steps:
        hint = suggestion(step, playbook.steps)
        raise _usage(f"{file} has no step {step!r} ({hint}).")


def given_by(
    playbook: Playbook,
    *,
    payload: Path | None,
    assignments: Iterable[str],
    ctx: str,
    results: Iterable[str],
    item: str,
    index: int,
) -> Given:
    given = _decoded("--ctx", ctx) if ctx else {}
    if not isinstance(given, dict):
        raise _usage("--ctx is a JSON object.")
    return Given(
        payload=build_payload(payload, assignments),
        ctx=given,
        results=dict(_result(playbook, text) for text in results),
        items=[_decoded("--item", item)] if item else [],
        index=index,
    )


def _result(playbook: Playbook, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise _usage(f"--result {text!r} is not of the form STEP=JSON or STEP=@FILE.")
    known = {*playbook.steps} | {
        f"{step.step}.{task.label}" for step in playbook.steps.values() for task in step.tool
    }
    if name not in known:
        raise _usage(f"--result {name!r} names no step ({suggestion(name, playbook.steps)}).")
    if not value.startswith("@"):
        return name, _decoded(f"--result {name}", value)
    file = Path(value[1:])
    try:
        return name, _decoded(f"--result {name}", file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise _usage(f"--result {name}: cannot read {file}: {error}") from error


def _decoded(option: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise _usage(f"{option} is not JSON: {error}") from error


class _Dumper(yaml.SafeDumper):
    """Code and statements as they are written, line by line."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def print_preview(preview: Preview, *, as_json: bool) -> None:
    shown = msgspec.to_builtins(preview)
    if as_json:
        print_json(shown)
        return
    shown.pop("problems", None)
    typer.echo(yaml.dump(shown, Dumper=_Dumper, sort_keys=False, allow_unicode=True), nl=False)
    for problem in preview.problems:
        help_ = f" (try {problem.hint})" if problem.hint else ""
        say(f"step `{preview.step}`, field `{problem.field}`: {problem.message}{help_}")


def _usage(message: str) -> CommandFailed:
    return CommandFailed(message, exit_code=EXIT_USAGE)
