"""bench."""

# ruff: noqa: PLC0415 - `noetl --help` must not wait for what only a running command needs

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from noetl_cli.terminal import print_answer


class Name(StrEnum):
    fanout = "fanout"
    chain = "chain"
    many = "many"
    latency = "latency"
    payload = "payload"
    status = "status"
    compact = "compact"


def bench(
    name: Annotated[Name, typer.Argument(metavar="NAME", help=", ".join(Name))],
    n: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How much work.", show_default=False)
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="D", help="Measure the `noetl dev` that runs there."),
    ] = None,
    archive_dir: Annotated[
        str,
        typer.Option(metavar="D", help="compact: a directory, or s3://BUCKET/PREFIX."),
    ] = "",
    shards: Annotated[
        int, typer.Option(metavar="N", min=1, help="compact: shards the events are of.")
    ] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in one line of JSON.")] = False,
) -> None:
    """Measure throughput, latency, events, CPU and memory, on a system started for it.

    fanout: one execution, N no-op iterations. chain: N no-op steps in a row. many: N executions
    of three steps. latency: one step on an idle system, N times. payload: N tasks of 1 MB each.
    status: N reads of a status with 100,000 executions in the table.
    compact: N events of an old week archived and dropped.
    """
    import msgspec

    from noetl_cli.asynchronous import run_until_signal
    from noetl_cli.bench.compaction import measure_compaction
    from noetl_cli.bench.measure import measure, table
    from noetl_cli.bench.status_read import measure_status

    figures: msgspec.Struct
    if name is Name.compact:
        figures = run_until_signal(measure_compaction(n=n, archive_dir=archive_dir, shards=shards))
    elif name is Name.status:
        figures = run_until_signal(measure_status(n=n, data_dir=data_dir))
    else:
        figures = run_until_signal(measure(name, n=n, data_dir=data_dir))
    print_answer(figures, as_json=as_json, text=lambda: table(figures))
