"""Executions that are past retention leave the database, and nothing is lost on the way.

    1  survey     which executions of a week ended long ago; who stays ("kept")
    2  write      their rows, in the order of their keys, as Parquet files in NAME.making
    3  read back  each file, and compare every byte of its rows with what Postgres gave
    4  record     the manifest with counts and digests, in one commit: now it is an archive
    5  publish    rename the directory to NAME
    6  check      that every file is there with its digest, now, before anything goes
    7  drop       noetl.drop_archived(): in one commit the partition goes, the rows of those who
                  stay move to the DEFAULT partition, and the manifest says so

What if we die between two of these lines? After 1, 2 and 3 there is a NAME.making that no manifest
names: the next turn removes it and begins anew. After 4, 5 and 6 the rows are in both places, and
readers ask Postgres first: the next turn goes on at 5. After 7 there is nothing left to do. A
directory that has its final name is removed only together with a manifest that was not dropped.

What if the log goes on meanwhile? A retry could wake an archived execution between 2 and 7. The
tails of the partition are read before the first row is copied; line 7 finds, under a lock, whatever
was appended after them, changes nothing and says `changed`. The archive is forgotten, its files
are removed, and a later turn archives what is true then.

What if another compactor believes to lead? All statements of a turn go through the one connection
that holds an advisory lock. A compactor that has lost it has lost the connection, so it can neither
record nor drop; files that it may still write are in a NAME.making that nobody names.

A week without a partition of its own, and one in which so many executions still run that moving
them would hold the log up, is archived in slices whose rows are deleted instead.
"""

import asyncio
import hashlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import duckdb
import msgspec
import structlog

from noetl_compactor import metrics
from noetl_core.blob import parquet
from noetl_core.domain.retention import Week, is_past, week_named, week_of
from noetl_core.store import archive
from noetl_core.store.archive import FROM_THE_FIRST, Archive, File, Source, Survey
from noetl_core.store.postgres import Connection, Pool

FILE_ROWS_MAX = 200_000
FILE_BYTES_MAX = 128 * 1024 * 1024
MOVED_ROWS_MAX = 100_000
"""More rows than these do not move under the lock of a drop: then the others are deleted."""
SLICE_ROWS = 50_000
"""Rows that are deleted in one transaction, where no partition can be dropped."""
MAKING = ".making"

Step = Literal[
    "surveyed", "file written", "file compared", "recorded", "published", "checked", "dropped"
]

log = structlog.get_logger()


def _nothing(_step: Step) -> None:
    """Between the lines of the protocol nothing happens, unless a test says so."""


class Rules(NamedTuple):
    """How to archive. `after` is called after every line of the protocol."""

    root: Path
    mint: Callable[[], int]
    kept_from_ms: int
    file_rows: int = FILE_ROWS_MAX
    moved_rows: int = MOVED_ROWS_MAX
    slice_rows: int = SLICE_ROWS
    after: Callable[[Step], None] = _nothing


class Cut(NamedTuple):
    """A range of executions of one week that is archived together."""

    week: Week
    lower: int
    upper: int
    drops: bool
    tails: dict[str, int]
    survey: Survey


async def archive_past(pool: Pool, rules: Rules) -> int:
    """One turn: finish what was begun, then archive all that is past. Says how many events went."""
    async with pool.acquire() as conn, _alone(conn) as is_alone:
        if not is_alone:
            return 0
        await _remove_unrecorded(conn, rules.root)
        events = await _finish_recorded(conn, rules)
        for name in await archive.partition_weeks(conn):
            week = week_named(name)
            is_ripe = is_past(week, kept_from_ms=rules.kept_from_ms)
            if is_ripe and not await _is_pending(conn, week):
                events += await _archive_partition(conn, week, rules)
        return events + await _archive_rest(conn, rules)


@asynccontextmanager
async def _alone(conn: Connection) -> AsyncIterator[bool]:
    """Whether this connection holds the lock; sessions are shared, so it is given back."""
    if not await archive.try_lock(conn):
        yield False
        return
    try:
        yield True
    finally:
        if not conn.is_closed():
            await archive.unlock(conn)


async def _archive_partition(conn: Connection, week: Week, rules: Rules) -> int:
    """A week that has its partition: it goes as a whole, unless too much of it must stay."""
    tails = await archive.partition_tails(conn, week.name)
    survey = await _survey(conn, week.lower, week.upper, rules)
    if survey.kept_events > rules.moved_rows:
        return 0
    return await _archive(conn, Cut(week, week.lower, week.upper, True, tails or {}, survey), rules)


async def _archive_rest(conn: Connection, rules: Rules) -> int:
    """What is past and still there: rows of the DEFAULT partition, and of weeks that stay."""
    events = 0
    week = await _next_week(conn, 0, rules)
    while week is not None:
        if not await _is_pending(conn, week):
            events += await _archive_slices(conn, week, rules)
        week = await _next_week(conn, week.upper, rules)
    return events


async def _is_pending(conn: Connection, week: Week) -> bool:
    """Rows of the week are archived and not dropped yet: they must not go into another archive."""
    recorded = await archive.recorded(conn)
    return any(one.week == week.name and not one.is_dropped for one in recorded)


async def _next_week(conn: Connection, lower: int, rules: Rules) -> Week | None:
    first = await archive.first_execution(conn, lower=lower, upper=2**63 - 1)
    if first is None:
        return None
    week = week_of(first)
    return week if is_past(week, kept_from_ms=rules.kept_from_ms) else None


async def _archive_slices(conn: Connection, week: Week, rules: Rules) -> int:
    events = 0
    lower = week.lower
    while lower < week.upper:
        first = await archive.first_execution(conn, lower=lower, upper=week.upper)
        if first is None:
            break
        upper = await archive.slice_end(conn, lower=first, upper=week.upper, rows=rules.slice_rows)
        survey = await _survey(conn, first, upper, rules)
        if survey.executions:
            cut = Cut(week, first, upper, False, {}, survey)
            events += await _archive(conn, cut, rules)
        lower = upper
    return events


async def _survey(conn: Connection, lower: int, upper: int, rules: Rules) -> Survey:
    kept_from = datetime.fromtimestamp(rules.kept_from_ms / 1000, UTC)
    return await archive.survey(conn, lower=lower, upper=upper, kept_from=kept_from)


async def _archive(conn: Connection, cut: Cut, rules: Rules) -> int:
    """Lines 2 to 7 for one cut. Says how many events left the database."""
    begun = time.perf_counter()
    rules.after("surveyed")
    try:
        made = await _write(conn, cut, rules)
    except (parquet.ArchiveDamagedError, duckdb.Error):
        # Nothing was recorded, so nothing is lost; the other weeks and duties go on.
        metrics.ARCHIVES_FAILED.add(1)
        log.exception("archive.failed", week=cut.week.name)
        return 0
    if made.event_count != cut.survey.events:
        # An execution went on, or ended, while we copied: nobody was told of this archive yet.
        shutil.rmtree(_making(rules.root, made.name))
        log.info("archive.overtaken", week=cut.week.name)
        return 0
    async with conn.transaction():
        await archive.record(conn, made, sha256=_digest_of(made.files))
    rules.after("recorded")
    metrics.EVENTS_ARCHIVED.add(made.event_count)
    seconds = time.perf_counter() - begun
    metrics.EVENTS_PER_SECOND.set(made.event_count / seconds)
    log.info(
        "archive.recorded",
        archive=made.name,
        executions=made.executions,
        events=made.event_count,
        results=made.result_count,
        kept=len(made.kept),
        seconds=round(seconds, 3),
    )
    return made.event_count if await _drop(conn, made.archive_id, made.name, rules) else 0


async def _write(conn: Connection, cut: Cut, rules: Rules) -> Archive:
    archive_id = rules.mint()
    name = archive.named(cut.week, archive_id)
    directory = _making(rules.root, name)
    directory.mkdir(parents=True)
    files = [
        *await _write_source(conn, cut, rules, "event", name),
        *await _write_source(conn, cut, rules, "result_ref", name),
    ]
    made = Archive(
        archive_id=archive_id,
        name=name,
        week=cut.week.name,
        lower=cut.lower,
        upper=cut.upper,
        drops=cut.drops,
        executions=cut.survey.executions,
        event_count=sum(file.rows for file in files if file.source == "event"),
        result_count=sum(file.rows for file in files if file.source == "result_ref"),
        kept=cut.survey.kept,
        tails=cut.tails,
        files=files,
    )
    # For whoever has the directory and no database.
    manifest = directory / "manifest.json"
    manifest.write_bytes(msgspec.json.format(msgspec.json.encode(made)))
    parquet.sync(manifest)
    parquet.sync(directory)
    return made


async def _write_source(
    conn: Connection, cut: Cut, rules: Rules, source: Source, name: str
) -> list[File]:
    """All rows of a table that belong to the cut, in as many files as they need."""
    files: list[File] = []
    after = FROM_THE_FIRST
    directory = _making(rules.root, name)
    # Beside the files: where they have room, the rows have room too.
    with tempfile.TemporaryDirectory(dir=directory) as scratch, parquet.connect() as connection:
        while True:
            csv = Path(scratch, "rows.csv")
            rows = await archive.copy_rows(
                conn,
                source,
                csv,
                lower=cut.lower,
                upper=cut.upper,
                kept=cut.survey.kept,
                after=after,
                rows_max=rules.file_rows,
                bytes_max=FILE_BYTES_MAX,
            )
            if not rows:
                return files
            target = directory / f"{source}-{len(files):04}.parquet"
            written = await _write_file(connection, source, csv, target, rows, rules)
            after = written.last
            files.append(_file(source, f"{name}/{target.name}", written))


async def _write_file(
    connection: duckdb.DuckDBPyConnection,
    source: Source,
    csv: Path,
    target: Path,
    rows: int,
    rules: Rules,
) -> parquet.Written:
    await asyncio.to_thread(parquet.write, connection, source, csv, target)
    rules.after("file written")
    written = await asyncio.to_thread(parquet.read_back, connection, source, csv, target, rows=rows)
    rules.after("file compared")
    return written


def _file(source: Source, path: str, written: parquet.Written) -> File:
    return File(
        source=source,
        path=path,
        rows=written.rows,
        bytes=written.bytes,
        sha256=written.sha256,
        lower=written.lower,
        upper=written.upper,
    )


async def _finish_recorded(conn: Connection, rules: Rules) -> int:
    """Go on with archives whose turn ended before their rows were dropped."""
    events = 0
    for one in await archive.recorded(conn):
        if not one.is_dropped and await _drop(conn, one.archive_id, one.name, rules):
            files = await archive.files(conn, one.archive_id)
            events += sum(file.rows for file in files if file.source == "event")
    return events


async def _drop(conn: Connection, archive_id: int, name: str, rules: Rules) -> bool:
    """Lines 5 to 7. False: the rows are still in the database."""
    _publish(rules.root, name)
    rules.after("published")
    files = await archive.files(conn, archive_id)
    damaged = await asyncio.to_thread(_damaged, rules.root, files)
    if damaged is not None:
        # The rows are still there, so nothing is lost: archive them again.
        log.error("archive.damaged", archive=name, file=damaged)
        await _discard(conn, archive_id, name, rules.root)
        return False
    rules.after("checked")
    outcome = await archive.drop(conn, archive_id)
    log.info("archive.drop", archive=name, outcome=outcome)
    metrics.DROPS.add(1, {"outcome": outcome})
    if outcome == "changed":
        await _discard(conn, archive_id, name, rules.root)
    if outcome == "dropped":
        rules.after("dropped")
    return outcome in {"dropped", "gone"}


def _publish(root: Path, name: str) -> None:
    making = _making(root, name)
    if making.is_dir():
        making.rename(root / name)
        parquet.sync(root)


async def _discard(conn: Connection, archive_id: int, name: str, root: Path) -> None:
    # Back to its first name, so that it is never there under the final one without a manifest.
    if (root / name).is_dir():
        (root / name).rename(_making(root, name))
    if await archive.discard(conn, archive_id):
        shutil.rmtree(_making(root, name), ignore_errors=True)


def _damaged(root: Path, files: list[File]) -> str | None:
    """The first file that is not there as it was written."""
    for file in files:
        path = root / file.path
        if not path.is_file() or parquet.digest(path) != file.sha256:
            return file.path
    return None


async def _remove_unrecorded(conn: Connection, root: Path) -> None:
    """Directories of turns that died. Ours is the only turn, so nobody is writing to them."""
    names = {one.name for one in await archive.recorded(conn)}
    for directory in _directories_being_made(root):
        if directory.name.removesuffix(MAKING) not in names:
            log.info("archive.removed_unrecorded", archive=directory.name)
            shutil.rmtree(directory, ignore_errors=True)


def _directories_being_made(root: Path) -> list[Path]:
    return sorted(root.glob(f"*{MAKING}"))


def _making(root: Path, name: str) -> Path:
    return root / f"{name}{MAKING}"


def _digest_of(files: list[File]) -> bytes:
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).digest()
