"""sql."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from typing import Annotated

import typer


def sql(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="A SELECT over `event` and `result_ref`.")
    ],
    archive_dir: Annotated[
        str,
        typer.Option(
            metavar="D",
            envvar="NOETL_ARCHIVE_DIR",
            help="A directory or s3://BUCKET/PREFIX; by default the archives of `noetl dev`.",
            show_default=False,
        ),
    ] = "",
    week: Annotated[
        list[str] | None,
        typer.Option(metavar="W", help="Only executions that began in it, such as 2026w07."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Answer in JSON, one row a line.")
    ] = False,
) -> None:
    """Ask the archives of what is past retention, with DuckDB. Nothing can be changed.

    noetl sql "SELECT node_name, count(*) FROM event GROUP BY 1 ORDER BY 2 DESC"
    """
    from noetl_cli.archives import ask
    from noetl_cli.terminal import print_json

    answer = ask(query, archive_dir, week or [])
    if as_json:
        for row in answer.objects():
            print_json(row)
    else:
        typer.echo(answer.table())
