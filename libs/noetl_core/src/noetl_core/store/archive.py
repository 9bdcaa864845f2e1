"""Archives: what the compactor asks of the log, and the manifests of kind 'archive'.

Everything here may be asked by the one connection that holds `lock`, so that two compactors never
work at the same time: whoever loses the connection has lost the lock, and can say nothing more.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.retention import Week
from noetl_core.store.postgres import Connection, Pool

Source = Literal["event", "result_ref"]
Dropped = Literal["dropped", "gone", "busy", "changed"]

STATEMENT_SECONDS_MAX = 1800.0
"""A week of a large system is counted and copied in minutes."""

_TRY_LOCK = "SELECT pg_try_advisory_lock(hashtext('noetl.compactor.archive'))"
_UNLOCK = "SELECT pg_advisory_unlock(hashtext('noetl.compactor.archive'))"


async def try_lock(conn: Connection) -> bool:
    return bool(await conn.fetchval(_TRY_LOCK))


async def unlock(conn: Connection) -> None:
    await conn.execute(_UNLOCK)


_FIRST = "SELECT min(execution_id) FROM noetl.event WHERE execution_id >= $1 AND execution_id < $2"


async def first_execution(conn: Connection, *, lower: int, upper: int) -> ExecutionId | None:
    """The oldest one in the log from `lower` on, below `upper`."""
    found: ExecutionId | None = await conn.fetchval(_FIRST, lower, upper)
    return found


_PARTITION_WEEKS = """
SELECT DISTINCT substring(c.relname FROM '[0-9]{4}w[0-9]{2}$') AS week
FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent IN ('noetl.event'::regclass, 'noetl.result_ref'::regclass)
  AND c.relname ~ '[0-9]{4}w[0-9]{2}$'
ORDER BY week
"""


async def partition_weeks(conn: Connection) -> list[str]:
    """The weeks that have a partition of their own, of the log or of the results."""
    return [str(row["week"]) for row in await conn.fetch(_PARTITION_WEEKS)]


_TAILS = "SELECT noetl.partition_tails($1)"


async def partition_tails(conn: Connection, week: str) -> dict[str, int] | None:
    """The last event of every shard in the partition of a week; None without a partition."""
    text = await conn.fetchval(_TAILS, week)
    return None if text is None else msgspec.json.decode(text, type=dict[str, int])


_SLICE = """
SELECT execution_id FROM noetl.event
WHERE execution_id >= $1 AND execution_id < $2
ORDER BY execution_id, event_id
OFFSET $3 LIMIT 1
"""


async def slice_end(conn: Connection, *, lower: int, upper: int, rows: int) -> int:
    """Where whole executions of about `rows` events end."""
    beyond = await conn.fetchval(_SLICE, lower, upper, rows)
    return upper if beyond is None else max(int(beyond), lower + 1)


class Survey(NamedTuple):
    """Of a range of executions: what may be archived, and who stays."""

    executions: int
    events: int
    kept: list[int]
    kept_events: int


# An execution may go when it ended long ago, when its row says so of its very last event (a retry
# that is not projected yet would be later), and when no ancestor may still read what it returned.
# One with a result that has a time to live stays until that is over and its payload removed: nobody
# takes anything out of a file of an archive.
_SURVEY = """
WITH RECURSIVE found AS (
    SELECT execution_id, count(*) AS events, max(event_id) AS last
    FROM noetl.event WHERE execution_id >= $1 AND execution_id < $2
    GROUP BY execution_id
), judged AS (
    SELECT f.execution_id, f.events, x.parent_execution_id,
           coalesce(
               x.status IN ('COMPLETED', 'FAILED', 'CANCELLED')
               AND x.last_projected_event_id >= f.last
               AND coalesce(x.ended_at, x.updated_at) < $3, false
           ) AS ended
    FROM found AS f LEFT JOIN noetl.execution AS x USING (execution_id)
), family AS (
    SELECT execution_id, parent_execution_id AS ancestor
    FROM judged WHERE ended AND parent_execution_id IS NOT NULL
    UNION
    SELECT f.execution_id, x.parent_execution_id
    FROM family AS f JOIN noetl.execution AS x ON x.execution_id = f.ancestor
    WHERE x.parent_execution_id IS NOT NULL
), needed AS (
    SELECT DISTINCT f.execution_id
    FROM family AS f JOIN noetl.execution AS x ON x.execution_id = f.ancestor
    WHERE x.status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED')
       OR coalesce(x.ended_at, x.updated_at) >= $3
), expiring AS (
    SELECT DISTINCT execution_id FROM noetl.result_ref
    WHERE execution_id >= $1 AND execution_id < $2
      AND expires_at IS NOT NULL AND removed_at IS NULL
), sorted AS (
    SELECT j.execution_id, j.events,
           j.ended AND n.execution_id IS NULL AND t.execution_id IS NULL AS goes
    FROM judged AS j
    LEFT JOIN needed AS n USING (execution_id) LEFT JOIN expiring AS t USING (execution_id)
)
SELECT count(*) FILTER (WHERE goes),
       coalesce(sum(events) FILTER (WHERE goes), 0)::bigint,
       coalesce(array_agg(execution_id ORDER BY execution_id) FILTER (WHERE NOT goes), '{}'),
       coalesce(sum(events) FILTER (WHERE NOT goes), 0)::bigint
FROM sorted
"""


async def survey(conn: Connection, *, lower: int, upper: int, kept_from: Any) -> Survey:
    row = await conn.fetchrow(_SURVEY, lower, upper, kept_from, timeout=STATEMENT_SECONDS_MAX)
    assert row is not None
    return Survey(*row)


class Weight(NamedTuple):
    """How much one transaction would move or delete: rows of both tables, and their documents."""

    rows: int
    bytes: int


# What is stored of a document is its size here: nothing is unpacked to find it.
_KEPT_WEIGHT = """
SELECT count(*), coalesce(sum(size), 0)::bigint
FROM (
    SELECT coalesce(pg_column_size(context), 0) + coalesce(pg_column_size(result), 0) AS size
    FROM noetl.event WHERE execution_id = ANY ($1::bigint[])
    UNION ALL
    SELECT coalesce(pg_column_size(inline), 0)
    FROM noetl.result_ref WHERE execution_id = ANY ($1::bigint[])
) AS found
"""


async def kept_weight(conn: Connection, kept: Sequence[int]) -> Weight:
    """Of executions that stay: what moves when the partition of their week goes."""
    row = await conn.fetchrow(_KEPT_WEIGHT, kept, timeout=STATEMENT_SECONDS_MAX)
    assert row is not None
    return Weight(*row)


_DEFAULT_WEIGHT = "SELECT rows, bytes FROM noetl.default_weight($1, $2, $3)"


async def default_weight(conn: Connection, *, lower: int, upper: int, rows_max: int) -> Weight:
    """What of a range is in the DEFAULT partitions; not much more than `rows_max` is counted."""
    row = await conn.fetchrow(_DEFAULT_WEIGHT, lower, upper, rows_max)
    assert row is not None
    return Weight(*row)


class Key(NamedTuple):
    """Rows are copied in the order of their primary key; a file begins behind the one before."""

    execution_id: int
    row_id: int


FROM_THE_FIRST = Key(-1, -1)

# Columns as text that Parquet gives back byte for byte: documents as they are stored, bytes as
# hexadecimal digits, moments in UTC. A file is bounded in rows and in bytes.
_COPY_EVENTS = """
SELECT execution_id, event_id, event_key, shard_id, event_type, status, node_name, command_id,
       loop_id, iter_index, attempt, parent_event_id, parent_execution_id, catalog_id, epoch_id,
       context, result, meta, error, created_at AT TIME ZONE 'UTC'
FROM (
    SELECT e.*, sum(coalesce(pg_column_size(e.context), 0) + coalesce(pg_column_size(e.result), 0))
        OVER before AS bytes_before
    FROM (
        SELECT * FROM noetl.event
        WHERE execution_id >= $1 AND execution_id < $2 AND execution_id <> ALL ($3::bigint[])
          AND (execution_id, event_id) > ($4, $5)
        ORDER BY execution_id, event_id LIMIT $6
    ) AS e
    WINDOW before AS (
        ORDER BY execution_id, event_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
) AS bounded
WHERE coalesce(bytes_before, 0) < $7
ORDER BY execution_id, event_id
"""
_COPY_RESULTS = """
SELECT execution_id, ref_id, parent_ref_id, step, store_tier, physical_uri, media_type, bytes,
       encode(sha256, 'hex'), encode(inline, 'hex'), preview, expires_at AT TIME ZONE 'UTC',
       created_at AT TIME ZONE 'UTC', removed_at AT TIME ZONE 'UTC'
FROM (
    SELECT r.*, sum(coalesce(octet_length(r.inline), 0)) OVER before AS bytes_before
    FROM (
        SELECT * FROM noetl.result_ref
        WHERE execution_id >= $1 AND execution_id < $2 AND execution_id <> ALL ($3::bigint[])
          AND (execution_id, ref_id) > ($4, $5)
        ORDER BY execution_id, ref_id LIMIT $6
    ) AS r
    WINDOW before AS (
        ORDER BY execution_id, ref_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
) AS bounded
WHERE coalesce(bytes_before, 0) < $7
ORDER BY execution_id, ref_id
"""
_COPIES: dict[Source, str] = {"event": _COPY_EVENTS, "result_ref": _COPY_RESULTS}

NULL = r"\N"

COPY_SETTINGS = {"tcp_user_timeout": "0"}
"""For every session that copies rows out. Who has no room to write to does not read, either; for
the server that looks like somebody who is gone."""


async def copy_rows(
    conn: Connection,
    source: Source,
    output: Path,
    *,
    lower: int,
    upper: int,
    kept: Sequence[int],
    after: Key,
    rows_max: int,
    bytes_max: int,
) -> int:
    """The next rows as CSV, every value quoted; says how many there were."""
    tag = await conn.copy_from_query(
        _COPIES[source],
        *(lower, upper, list(kept), *after, rows_max, bytes_max),
        output=output,
        format="csv",
        null=NULL,
        force_quote=True,
        timeout=STATEMENT_SECONDS_MAX,
    )
    return int(tag.rsplit(" ", 1)[-1])


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file of an archive. `path` is its name in the place of all archives."""

    source: Source
    path: str
    rows: int
    bytes: int
    sha256: str
    lower: int
    upper: int
    """The least and the greatest execution in it."""


class Archive(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says: which executions of which range went into which files."""

    archive_id: int
    name: str
    week: str
    lower: int
    upper: int
    drops: bool
    """The partition of the week goes as a whole."""
    executions: int
    event_count: int
    result_count: int
    kept: list[int]
    tails: dict[str, int]
    files: list[File]


_RECORD = """
INSERT INTO noetl.manifest (execution_id, manifest_id, kind, item_count, part_count, sha256, meta)
VALUES ($1, $2, 'archive', $3, $4, $5, $6)
"""
_RECORD_PARTS = """
INSERT INTO noetl.manifest_part (
    execution_id, manifest_id, part_index, item_count, store_tier, physical_uri, bytes, sha256,
    source, lower_id, upper_id
)
SELECT $1, $2, *
FROM unnest(
    $3::integer[], $4::integer[], $5::text[], $6::text[], $7::bigint[], $8::bytea[], $9::text[],
    $10::bigint[], $11::bigint[]
)
"""
SCHEME = "archive:"


async def record(conn: Connection, archive: Archive, *, sha256: bytes, tier: str) -> None:
    """From here on it is an archive: only what was read back and compared may be recorded.

    `tier` is the kind of place that it is in.
    """
    meta = {
        "name": archive.name,
        "week": archive.week,
        "lower": str(archive.lower),
        "upper": str(archive.upper),
        "drops": archive.drops,
        "executions": archive.executions,
        "result_count": archive.result_count,
        "kept": [str(one) for one in archive.kept],
        "tails": archive.tails,
    }
    await conn.execute(
        _RECORD,
        archive.lower,
        archive.archive_id,
        archive.event_count,
        len(archive.files),
        sha256,
        msgspec.json.encode(meta).decode(),
    )
    files = archive.files
    await conn.execute(
        _RECORD_PARTS,
        archive.lower,
        archive.archive_id,
        list(range(len(files))),
        [file.rows for file in files],
        [tier] * len(files),
        [SCHEME + file.path for file in files],
        [file.bytes for file in files],
        [bytes.fromhex(file.sha256) for file in files],
        [file.source for file in files],
        [file.lower for file in files],
        [file.upper for file in files],
    )


class Recorded(NamedTuple):
    archive_id: int
    name: str
    week: str
    is_dropped: bool


_RECORDED = """
SELECT manifest_id, meta ->> 'name', meta ->> 'week', meta ? 'dropped_at'
FROM noetl.manifest WHERE kind = 'archive' ORDER BY manifest_id
"""


async def recorded(conn: Connection | Pool) -> list[Recorded]:
    return [Recorded(*row) for row in await conn.fetch(_RECORDED)]


_FILES = """
SELECT p.source, p.physical_uri, p.item_count, p.bytes, p.sha256, p.lower_id, p.upper_id
FROM noetl.manifest AS m JOIN noetl.manifest_part AS p USING (execution_id, manifest_id)
WHERE m.kind = 'archive' AND m.manifest_id = $1
ORDER BY p.part_index
"""


async def files(conn: Connection, archive_id: int) -> list[File]:
    return [_file(row) for row in await conn.fetch(_FILES, archive_id)]


# No archive covers most of the executions that are asked for: one look into a small index.
# Those who stayed behind are in the range of its files and not in them. What is recorded and not
# dropped yet is in the database, complete: no reader needs the files.
_COVERING = """
FROM noetl.manifest_part AS p JOIN noetl.manifest AS m USING (execution_id, manifest_id)
WHERE p.lower_id IS NOT NULL AND int8range(p.lower_id, p.upper_id, '[]') @> $1::bigint
  AND NOT m.meta -> 'kept' ? $1::bigint::text
"""
_FILES_OF = f"""
SELECT p.source, p.physical_uri, p.item_count, p.bytes, p.sha256, p.lower_id, p.upper_id
{_COVERING} AND m.meta ? 'dropped_at'
ORDER BY p.manifest_id, p.part_index
"""


async def files_of(conn: Connection | Pool, execution_id: ExecutionId) -> list[File]:
    """The files that hold the rows of an execution; none unless it has left the database."""
    return [_file(row) for row in await conn.fetch(_FILES_OF, execution_id)]


_COVERS = f"SELECT EXISTS (SELECT {_COVERING})"


async def covers(conn: Connection | Pool, execution_id: ExecutionId) -> bool:
    """Whether its rows are in an archive, whether or not they have left the database by now."""
    return bool(await conn.fetchval(_COVERS, execution_id))


def _file(row: Any) -> File:
    return File(
        source=row[0],
        path=row[1].removeprefix(SCHEME),
        rows=row[2],
        bytes=row[3],
        sha256=row[4].hex(),
        lower=row[5],
        upper=row[6],
    )


_DROP = "SELECT noetl.drop_archived($1)"


async def drop(conn: Connection, archive_id: int) -> Dropped:
    """Take out of the database what the archive holds; see the function in the migrations."""
    outcome: Dropped = await conn.fetchval(_DROP, archive_id, timeout=STATEMENT_SECONDS_MAX)
    return outcome


_DISCARD = "SELECT noetl.discard_archive($1)"


async def discard(conn: Connection, archive_id: int) -> bool:
    """Forget an archive that the log has overtaken."""
    return bool(await conn.fetchval(_DISCARD, archive_id))


def named(week: Week, archive_id: int) -> str:
    return f"{week.name}-{archive_id}"
