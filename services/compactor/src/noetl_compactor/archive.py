"""Executions that are past retention leave the database, and nothing is lost on the way.

    1  survey     which executions of a week ended long ago; who stays ("kept")
    2  begin      the mark making/NAME in the place of archives: what is under NAME/ is unfinished
    3  write      their rows, in the order of their keys, as Parquet files on our own disk
    4  compare    each file: every byte of its rows with what Postgres gave
    5  put        it into the place, and read it back from there: the digest must be the same
    6  record     the manifest with counts and digests, in one commit: now it is an archive
    7  publish    remove the mark
    8  check      that every file is there with its digest, now, before anything goes
    9  drop       noetl.drop_archived(): in one commit the partition goes, the rows of those who
                  stay move to the DEFAULT partition, and the manifest says so

The place is a directory or a bucket (noetl_core.blob.place); no line knows which.

What if we die between two of these lines? Up to 5 there are files under a mark that no manifest
names: the next turn removes them and begins anew. After 6, 7 and 8 the rows are in both places, and
readers ask Postgres first: the next turn goes on at 7. After 9 there is nothing left to do. Files
without a mark are never removed: whoever lost a manifest still has them.

What if the place does not answer? The turn ends there, with a warning, and a later one goes on as
if it had died. That nothing was said of a file is no reason to write it again, still less to drop.

What if a file cannot be made: a full disk, a row that does not come back as it was? What is there
of the archive is removed at once, and the other weeks go on. The next turn tries it again; a week
that fails then, too, rests for an hour.

What if the log goes on meanwhile? A retry could wake an archived execution between 3 and 9. The
tails of the partition are read before the first row is copied; line 9 finds, under a lock, whatever
was appended after them, changes nothing and says `changed`. The archive is forgotten, its files
are removed under a mark, and a later turn archives what is true then.

What if another compactor believes to lead? All statements of a turn go through the one connection
that holds an advisory lock. A compactor that has lost it has lost the connection, so it can neither
record nor drop. Names are never used twice: a file that it may still put is one that nobody names.

A week without a partition of its own, and one in which so much stays that moving it would hold the
log up, is archived in slices whose rows are deleted instead.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import duckdb
import structlog

from noetl_compactor import metrics
from noetl_core.blob import parquet
from noetl_core.blob.archives import MAKING, mark_of, write_manifest
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.place import Place
from noetl_core.domain.retention import Week, is_past, week_named, week_of
from noetl_core.store import archive
from noetl_core.store.archive import FROM_THE_FIRST, Archive, File, Source, Survey, Weight
from noetl_core.store.postgres import Connection, Pool

FILE_ROWS_MAX = 200_000
FILE_BYTES_MAX = 16 * 1024 * 1024
"""To make a file and to read it back takes ten times as much memory."""
MOVED_ROWS_MAX = 5_000
MOVED_BYTES_MAX = 8 * 1024 * 1024
"""More than this does not move under the lock of a drop: then the others are deleted."""
SLICE_ROWS = 50_000
"""Rows that are deleted in one transaction, where no partition can be dropped."""
CHECKED_AT_ONCE = 4
REST_SECONDS = 3600.0
FAILURES_MAX = 2
"""In a row, for one week: the first may have been bad luck, so the next turn tries again."""

Step = Literal[
    "surveyed",
    "begun",
    "file written",
    "file compared",
    "file put",
    "file read back",
    "recorded",
    "published",
    "checked",
    "dropped",
]

log = structlog.get_logger()


def _nothing(_step: Step) -> None:
    """Between the lines of the protocol nothing happens, unless a test says so."""


class Resting:
    """Weeks of which nothing could go the last time: reading them every turn would not help."""

    def __init__(self, seconds: float = REST_SECONDS) -> None:
        self._seconds = seconds
        self._until: dict[str, float] = {}
        self._failures: Counter[str] = Counter()

    def put(self, week: Week) -> None:
        self._until[week.name] = time.monotonic() + self._seconds

    def failed(self, week: Week) -> None:
        """It could not be written; what is wrong once more will hardly be mended in a minute."""
        self._failures[week.name] += 1
        if self._failures[week.name] >= FAILURES_MAX:
            self.put(week)

    def written(self, week: Week) -> None:
        del self._failures[week.name]

    def __contains__(self, week: Week) -> bool:
        return time.monotonic() < self._until.get(week.name, 0.0)


class Rules(NamedTuple):
    """How to archive. `after` is called after every line of the protocol."""

    place: Place
    mint: Callable[[], int]
    kept_from_ms: int
    file_rows: int = FILE_ROWS_MAX
    moved_rows: int = MOVED_ROWS_MAX
    moved_bytes: int = MOVED_BYTES_MAX
    slice_rows: int = SLICE_ROWS
    after: Callable[[Step], None] = _nothing
    resting: Resting | None = None


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
    events = 0
    async with pool.acquire() as conn, _alone(conn) as is_alone:
        if not is_alone:
            return 0
        try:
            async for gone in _turn(conn, rules):
                events += gone
        except StoreAwayError as error:
            # Whatever is not in the place for sure is in the database: a later turn goes on.
            metrics.PLACE_AWAY.add(1)
            log.warning("archive.place_away", place=rules.place.location, error=str(error))
    return events


async def _turn(conn: Connection, rules: Rules) -> AsyncIterator[int]:
    """How many events went, archive by archive."""
    await _remove_unrecorded(conn, rules.place)
    yield await _finish_recorded(conn, rules)
    tried: set[str] = set()
    for name in await archive.partition_weeks(conn):
        week = week_named(name)
        is_ripe = is_past(week, kept_from_ms=rules.kept_from_ms) and not _rests(week, rules)
        if is_ripe and not await _is_pending(conn, week):
            cut = await _whole(conn, week, rules)
            if cut is not None:
                # If it does not go this time, a later turn tries again: its rows are not deleted
                # one by one because somebody asked for a retry just now.
                tried.add(week.name)
                yield await _archive(conn, cut, rules)
    yield await _archive_rest(conn, rules, tried)


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


async def _whole(conn: Connection, week: Week, rules: Rules) -> Cut | None:
    """A week that has its partition goes as a whole, unless too much would happen under the lock:
    rows that stay move, and rows that came before the partition are deleted."""
    tails = await archive.partition_tails(conn, week.name)
    survey = await _survey(conn, week.lower, week.upper, rules)
    if survey.kept_events > rules.moved_rows or _is_much(
        await archive.kept_weight(conn, survey.kept), rules
    ):
        return None
    undated = await archive.default_weight(
        conn, lower=week.lower, upper=week.upper, rows_max=rules.moved_rows
    )
    if _is_much(undated, rules):
        return None
    return Cut(week, week.lower, week.upper, True, tails or {}, survey)


def _is_much(weight: Weight, rules: Rules) -> bool:
    return weight.rows > rules.moved_rows or weight.bytes > rules.moved_bytes


async def _archive_rest(conn: Connection, rules: Rules, tried: Collection[str]) -> int:
    """What is past and still there: rows of the DEFAULT partition, and of weeks that stay."""
    events = 0
    week = await _next_week(conn, 0, rules)
    while week is not None:
        is_left = week.name not in tried and not _rests(week, rules)
        if is_left and not await _is_pending(conn, week):
            gone = await _archive_slices(conn, week, rules)
            if not gone and rules.resting is not None:
                rules.resting.put(week)
            events += gone
        week = await _next_week(conn, week.upper, rules)
    return events


def _rests(week: Week, rules: Rules) -> bool:
    return rules.resting is not None and week in rules.resting


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
    while lower < week.upper and not _rests(week, rules):
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
        made, shards = await _write(conn, cut, rules)
    except (parquet.ArchiveDamagedError, duckdb.Error, OSError):
        if conn.is_closed():
            raise  # we do not lead any more
        # Nothing was recorded, so nothing is lost: a full disk, say. Other weeks and duties go on.
        metrics.ARCHIVES_FAILED.add(1)
        log.exception("archive.failed", week=cut.week.name)
        if rules.resting is not None:
            rules.resting.failed(cut.week)
        # At once, because the disk may be full of it.
        await _remove_unrecorded(conn, rules.place)
        return 0
    if rules.resting is not None:
        rules.resting.written(cut.week)
    if made.event_count != cut.survey.events:
        # An execution went on, or ended, while we copied: nobody was told of this archive yet.
        await _remove(rules.place, made.name)
        log.info("archive.overtaken", week=cut.week.name)
        return 0
    async with conn.transaction():
        digest = _digest_of(made.files)
        await archive.record(conn, made, sha256=digest, tier=rules.place.tier)
    rules.after("recorded")
    metrics.EVENTS_ARCHIVED.add(made.event_count)
    seconds = time.perf_counter() - begun
    if shards:
        metrics.show_rate({shard: events / seconds for shard, events in shards.items()})
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


async def _write(conn: Connection, cut: Cut, rules: Rules) -> tuple[Archive, Counter[int]]:
    """The archive, and how many of its events are of each shard."""
    archive_id = rules.mint()
    name = archive.named(cut.week, archive_id)
    await rules.place.write(mark_of(name), b"")
    rules.after("begun")
    shards: Counter[int] = Counter()
    with rules.place.scratch() as scratch:
        shelf = Shelf(scratch, name, rules, shards)
        files = [
            *await _write_source(conn, cut, shelf, "event"),
            *await _write_source(conn, cut, shelf, "result_ref"),
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
    await write_manifest(rules.place, made)
    return made, shards


class Shelf(NamedTuple):
    """Where the files of one archive are made, and where they go."""

    scratch: Path
    name: str
    rules: Rules
    shards: Counter[int]


async def _write_source(conn: Connection, cut: Cut, shelf: Shelf, source: Source) -> list[File]:
    """All rows of a table that belong to the cut, in as many files as they need."""
    files: list[File] = []
    after = FROM_THE_FIRST
    while True:
        csv = shelf.scratch / "rows.csv"
        rows = await archive.copy_rows(
            conn,
            source,
            csv,
            lower=cut.lower,
            upper=cut.upper,
            kept=cut.survey.kept,
            after=after,
            rows_max=shelf.rules.file_rows,
            bytes_max=FILE_BYTES_MAX,
        )
        if not rows:
            return files
        target = shelf.scratch / f"{source}-{len(files):04}.parquet"
        written = await _make_file(shelf, source, csv, target, rows)
        after = written.last
        shelf.shards.update(written.shards)
        files.append(_file(source, f"{shelf.name}/{target.name}", written))
        await _put_file(shelf, files[-1], target)


async def _make_file(
    shelf: Shelf, source: Source, csv: Path, target: Path, rows: int
) -> parquet.Written:
    # One connection a file: what DuckDB has taken from the system it gives back at its end.
    with parquet.connect() as connection:
        await asyncio.to_thread(parquet.write, connection, source, csv, target)
        shelf.rules.after("file written")
        written = await asyncio.to_thread(
            parquet.read_back, connection, source, csv, target, rows=rows
        )
    shelf.rules.after("file compared")
    return written


async def _put_file(shelf: Shelf, file: File, target: Path) -> None:
    """Into the place; what counts is what the place then gives back."""
    place = shelf.rules.place
    await place.put(file.path, target)
    shelf.rules.after("file put")
    if await _is_damaged(place, file):
        raise parquet.ArchiveDamagedError(
            f"{place.location} does not give back {file.path} as it was put there"
        )
    shelf.rules.after("file read back")


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
    """Lines 7 to 9. False: the rows are still in the database."""
    await rules.place.delete(mark_of(name))
    rules.after("published")
    damaged = await _damaged(rules.place, await archive.files(conn, archive_id))
    if damaged is not None:
        # The rows are still there, so nothing is lost: archive them again.
        log.error("archive.damaged", archive=name, file=damaged)
        await _discard(conn, archive_id, name, rules.place)
        return False
    rules.after("checked")
    outcome = await archive.drop(conn, archive_id)
    log.info("archive.drop", archive=name, outcome=outcome)
    metrics.DROPS.add(1, {"outcome": outcome})
    if outcome == "changed":
        await _discard(conn, archive_id, name, rules.place)
    if outcome == "dropped":
        rules.after("dropped")
    return outcome in {"dropped", "gone"}


async def _damaged(place: Place, files: list[File]) -> str | None:
    """The first file that is not there as it was written."""
    limit = asyncio.Semaphore(CHECKED_AT_ONCE)

    async def check(file: File) -> bool:
        async with limit:
            return await _is_damaged(place, file)

    results = await asyncio.gather(*(check(file) for file in files))
    return next((file.path for file, wrong in zip(files, results, strict=True) if wrong), None)


async def _is_damaged(place: Place, file: File) -> bool:
    try:
        return await place.digest(file.path) != file.sha256
    except FileNotFoundError:
        return True


async def _discard(conn: Connection, archive_id: int, name: str, place: Place) -> None:
    # The mark first, so that its files are never there without a mark or a manifest.
    await place.write(mark_of(name), b"")
    if await archive.discard(conn, archive_id):
        await _remove(place, name)


async def _remove_unrecorded(conn: Connection, place: Place) -> None:
    """What turns have left that died. Ours is the only turn, so nobody is writing it."""
    # The marks first, then the manifests. The other way round, one that is made by our successor
    # while we sleep in between (and lose the lock) would look as if nobody had recorded it.
    names = [mark.removeprefix(MAKING) for mark in await place.names(MAKING)]
    recorded = {one.name: one for one in await archive.recorded(conn)} if names else {}
    for name in names:
        if name not in recorded:
            log.info("archive.removed_unrecorded", archive=name)
            await _remove(place, name)
        elif recorded[name].is_dropped:
            # Somebody wanted to discard it and was overtaken: it is all there is.
            await place.delete(mark_of(name))


async def _remove(place: Place, name: str) -> None:
    """The mark last: as long as there is a file, it says that the rest is not finished."""
    for file in await place.names(f"{name}/"):
        await place.delete(file)
    await place.delete(mark_of(name))


def _digest_of(files: list[File]) -> bytes:
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).digest()
