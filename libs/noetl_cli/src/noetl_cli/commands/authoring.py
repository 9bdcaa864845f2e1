"""test, render."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from pathlib import Path
from typing import Annotated

import typer

from noetl_cli.failure import EXIT_FAILED
from noetl_cli.terminal import print_json

Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


def run_tests(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Test files, or folders with *.test.yaml files."),
    ],
    as_json: Json = False,
) -> None:
    """Run the tests of playbooks, with mocked tools and nothing else running.

    Exit code: 0 all passed, 1 some failed, 2 a test file or playbook is wrong.
    """
    from noetl_cli.playbook_tests.report import outcome_lines, summary_line
    from noetl_cli.playbook_tests.runner import find_test_files, outcomes_of, read_tests

    # All are read before the first one runs: a wrong file is told at once.
    read = [(file, read_tests(file)) for file in find_test_files(files)]
    outcomes = []
    for file, tests in read:
        for outcome in outcomes_of(file, tests):
            outcomes.append(outcome)
            if not as_json:
                typer.echo("\n".join(outcome_lines(outcome)))
    failed = sum(not outcome.is_passed for outcome in outcomes)
    if as_json:
        print_json(
            {
                "passed": len(outcomes) - failed,
                "failed": failed,
                "tests": [outcome.as_json() for outcome in outcomes],
            }
        )
    else:
        typer.echo(summary_line(outcomes))
    raise typer.Exit(EXIT_FAILED if failed else 0)


def render(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The playbook.")],
    step: Annotated[str, typer.Argument(metavar="STEP", help="The step.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Put a value into the payload; a.b nests."),
    ] = None,
    payload: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The payload, a JSON or YAML object.")
    ] = None,
    ctx: Annotated[str, typer.Option(metavar="JSON", help="What steps before it have set.")] = "",
    results: Annotated[
        list[str] | None,
        typer.Option(
            "--result",
            metavar="STEP=JSON|@FILE",
            help="The result of a step, or of a task as STEP.TASK; may be repeated.",
        ),
    ] = None,
    item: Annotated[
        str, typer.Option(metavar="JSON", help="The item of the loop, instead of one of its own.")
    ] = "",
    index: Annotated[int, typer.Option(metavar="N", min=0, help="Which item of the loop.")] = 0,
    as_json: Json = False,
) -> None:
    """Show what a step would run with: its rendered input, tool, sink and loop. Nothing is run.

    Credentials are not opened; their fields are shown as ***. Exit code: 0 everything could be
    rendered, 1 something could not, 2 invalid playbook or usage.
    """
    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.preview import preview
    from noetl_cli.preview_options import given_by, named_step, print_preview
    from noetl_cli.validation import parse_file

    playbook = parse_file(file).playbook
    named_step(playbook, step, str(file))
    given = given_by(
        playbook,
        payload=payload,
        assignments=assignments or [],
        ctx=ctx,
        results=results or [],
        item=item,
        index=index,
    )
    shown = run_until_signal(preview(playbook, step, given))
    print_preview(shown, as_json=as_json)
    raise typer.Exit(EXIT_FAILED if shown.problems else 0)
