-- noetl: no transaction

-- What the compactor does to the log takes a moment of its writers, however large the log is; and
-- the history of an execution that was archived never forks.

-- Which file holds an execution: one look, however many archives there are.
CREATE INDEX CONCURRENTLY manifest_part_range_idx ON noetl.manifest_part
    USING gist (int8range(lower_id, upper_id, '[]')) WHERE lower_id IS NOT NULL;

-- How many rows of a range of executions are in the DEFAULT partitions, and what they weigh. It
-- stops counting a little after rows_max: more is too much for one transaction, however much more.
CREATE FUNCTION noetl.default_weight(
    low bigint, high bigint, rows_max bigint, OUT rows bigint, OUT bytes bigint
)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*), coalesce(sum(size), 0)::bigint
    FROM (
        (SELECT coalesce(pg_column_size(context), 0) + coalesce(pg_column_size(result), 0) AS size
         FROM noetl.event_default
         WHERE execution_id >= low AND execution_id < high LIMIT rows_max + 1)
        UNION ALL
        (SELECT coalesce(pg_column_size(inline), 0)
         FROM noetl.result_ref_default
         WHERE execution_id >= low AND execution_id < high LIMIT rows_max + 1)
    ) AS found
$$;
REVOKE ALL ON FUNCTION noetl.default_weight FROM PUBLIC;
GRANT EXECUTE ON FUNCTION noetl.default_weight TO noetl_compactor;

-- Raises NS003 when the log of one of these executions does not begin in the database: it is in an
-- archive. A batch that goes on with an execution that had ended says this after its inserts. From
-- then on nothing can be dropped until it is committed; and what was dropped before is seen here.
CREATE FUNCTION noetl.require_start(executions bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    missing bigint;
BEGIN
    SELECT wanted.execution_id INTO missing FROM unnest(executions) AS wanted (execution_id)
    WHERE NOT EXISTS (
        SELECT FROM noetl.event AS e
        WHERE e.execution_id = wanted.execution_id AND e.event_key = 'start'
    )
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'execution % went into an archive before it could go on: rerun it', missing
            USING ERRCODE = 'NS003';
    END IF;
END
$$;
REVOKE ALL ON FUNCTION noetl.require_start FROM PUBLIC;
GRANT EXECUTE ON FUNCTION noetl.require_start TO noetl_broker;

-- Says of results of the same transaction when their time is over. One statement an execution,
-- with its id written out: it is planned for the one partition that holds it and locks no other.
-- A join would lock them all, and wait for whoever has a lock on any.
CREATE FUNCTION noetl.set_expiries(
    executions bigint[], refs bigint[], ttls double precision[]
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    one record;
BEGIN
    FOR one IN
        SELECT u.execution_id, array_agg(u.ref_id) AS refs, array_agg(u.ttl) AS ttls
        FROM unnest(executions, refs, ttls) AS u (execution_id, ref_id, ttl)
        GROUP BY u.execution_id ORDER BY u.execution_id
    LOOP
        EXECUTE format($query$
            UPDATE noetl.result_ref AS r SET expires_at = now() + make_interval(secs => u.ttl)
            FROM unnest($1, $2) AS u (ref_id, ttl)
            WHERE r.execution_id = %s AND r.ref_id = u.ref_id
            $query$, one.execution_id
        ) USING one.refs, one.ttls;
    END LOOP;
END
$$;
REVOKE ALL ON FUNCTION noetl.set_expiries FROM PUBLIC;
GRANT EXECUTE ON FUNCTION noetl.set_expiries TO noetl_broker;

-- Removes from the database what an archive holds, in one transaction; the only way for rows to
-- leave the log. Says
--   'dropped'  the rows are gone, and those of executions that the archive leaves out ("kept")
--              are where they are found as before,
--   'gone'     they were dropped earlier,
--   'busy'     somebody held a lock for half a second: ask again later,
--   'changed'  the log is not what was archived (an execution went on since): archive again.
-- It raises an error when there is no such archive or its parts are not complete.
--
-- A week with its own partition loses it as a whole. The rows are counted before anything is
-- locked; what was appended after the archive was begun is found, under the lock, beyond the tails
-- that the archive recorded. Kept rows go to the DEFAULT partition. Without a partition of its own,
-- or when too much of it is kept or in the DEFAULT partition ("drops" is false), the archived rows
-- are deleted.
--
-- Every append waits while the log is locked: from the first lock on nothing may read a partition
-- from end to end. So each look at it is one that an index answers in its order, whoever calls this
-- has seen to it that few rows move, and rows are deleted before the lock, however many they are.
CREATE OR REPLACE FUNCTION noetl.drop_archived(archive_id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '500ms'
SET enable_seqscan = on
AS $$
DECLARE
    archive noetl.manifest;
    parts record;
    week text;
    low bigint;
    high bigint;
    kept bigint[];
    source text;
    partition_name text;
    found_rows bigint;
    removed bigint;
    is_newer boolean;
    counts bigint[] := '{}';
    executions bigint[];
    lasts bigint[];
BEGIN
    SELECT * INTO archive FROM noetl.manifest
    WHERE kind = 'archive' AND manifest_id = archive_id FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no verified archive %', archive_id
            USING ERRCODE = 'no_data_found';
    END IF;
    IF archive.meta ? 'dropped_at' THEN
        RETURN 'gone';
    END IF;
    SELECT count(*) AS files, count(p.sha256) AS sums,
           coalesce(sum(p.item_count) FILTER (WHERE p.source = 'event'), 0) AS events,
           coalesce(sum(p.item_count) FILTER (WHERE p.source = 'result_ref'), 0) AS results
    INTO parts
    FROM noetl.manifest_part AS p
    WHERE p.execution_id = archive.execution_id AND p.manifest_id = archive_id;
    week := archive.meta ->> 'week';
    low := (archive.meta ->> 'lower')::bigint;
    high := (archive.meta ->> 'upper')::bigint;
    kept := ARRAY(SELECT jsonb_array_elements_text(archive.meta -> 'kept')::bigint);
    IF week !~ '^[0-9]{4}w[0-9]{2}$' OR low >= high
       OR parts.files <> archive.part_count OR parts.sums <> parts.files
       OR parts.events <> archive.item_count
       OR parts.results <> (archive.meta ->> 'result_count')::bigint THEN
        RAISE EXCEPTION 'the archive % is not complete', archive_id
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;

    IF (archive.meta ->> 'drops')::boolean THEN
        FOREACH source IN ARRAY ARRAY['event', 'result_ref'] LOOP
            found_rows := 0;
            IF to_regclass(format('noetl.%I', source || '_' || week)) IS NOT NULL THEN
                EXECUTE format(
                    'SELECT count(*) FROM noetl.%I WHERE execution_id <> ALL ($1)',
                    source || '_' || week
                ) INTO found_rows USING kept;
            END IF;
            counts := counts || found_rows;
        END LOOP;
        PERFORM set_config('enable_seqscan', 'off', true);
        -- All locks before any work. Whoever reads or writes partitions holds a lock of their
        -- parent, so after the first two only maintenance can be in the way: no long wait for that.
        LOCK TABLE ONLY noetl.event IN ACCESS EXCLUSIVE MODE;
        PERFORM set_config('lock_timeout', '100ms', true);
        LOCK TABLE ONLY noetl.result_ref IN ACCESS EXCLUSIVE MODE;
        FOREACH source IN ARRAY ARRAY['event', 'result_ref'] LOOP
            FOREACH partition_name IN ARRAY ARRAY[source || '_default', source || '_' || week] LOOP
                IF to_regclass(format('noetl.%I', partition_name)) IS NOT NULL THEN
                    EXECUTE format('LOCK TABLE noetl.%I IN ACCESS EXCLUSIVE MODE', partition_name);
                END IF;
            END LOOP;
        END LOOP;
        partition_name := 'event_' || week;
        IF to_regclass(format('noetl.%I', partition_name)) IS NOT NULL THEN
            -- Without the order of an index the planner takes "any row" as "the first that is met"
            -- and reads the whole partition, once a shard, to find that there is none.
            EXECUTE format($query$
                WITH RECURSIVE shard AS (
                    SELECT min(shard_id) AS shard_id FROM noetl.%1$I
                    UNION ALL
                    SELECT (SELECT min(p.shard_id) FROM noetl.%1$I AS p
                            WHERE p.shard_id > shard.shard_id)
                    FROM shard WHERE shard.shard_id IS NOT NULL
                )
                SELECT EXISTS (
                    SELECT FROM shard CROSS JOIN LATERAL (
                        SELECT FROM noetl.%1$I AS p
                        WHERE p.shard_id = shard.shard_id
                          AND p.event_id > coalesce(($1 ->> shard.shard_id::text)::bigint, 0)
                          AND p.execution_id <> ALL ($2)
                        ORDER BY p.event_id LIMIT 1
                    ) AS newer
                    WHERE shard.shard_id IS NOT NULL
                )
                $query$, partition_name
            ) INTO is_newer USING archive.meta -> 'tails', kept;
            IF is_newer THEN
                RETURN 'changed';
            END IF;
        END IF;
        FOREACH source IN ARRAY ARRAY['event', 'result_ref'] LOOP
            partition_name := source || '_' || week;
            -- Rows of a week that came before its partition are in the DEFAULT one.
            EXECUTE format(
                'DELETE FROM noetl.%I WHERE execution_id >= $1 AND execution_id < $2'
                ' AND execution_id <> ALL ($3)', source || '_default'
            ) USING low, high, kept;
            GET DIAGNOSTICS removed = ROW_COUNT;
            found_rows := CASE source WHEN 'event' THEN counts[1] ELSE counts[2] END + removed;
            IF found_rows <> (CASE source WHEN 'event' THEN parts.events ELSE parts.results END) THEN
                RAISE EXCEPTION USING ERRCODE = 'NA001';
            END IF;
            IF to_regclass(format('noetl.%I', partition_name)) IS NOT NULL THEN
                EXECUTE format(
                    'ALTER TABLE noetl.%I DETACH PARTITION noetl.%I', source, partition_name
                );
                EXECUTE format(
                    'INSERT INTO noetl.%I SELECT * FROM noetl.%I WHERE execution_id = ANY ($1)',
                    source, partition_name
                ) USING kept;
                EXECUTE format('DROP TABLE noetl.%I', partition_name);
            END IF;
        END LOOP;
    ELSE
        -- First the work, beside which everybody appends; then the lock, and one more look. What an
        -- execution got before the lock is seen by the one or the other, and whoever comes after it
        -- finds that the log of the execution does not begin in the database (require_start).
        EXECUTE $query$
            WITH gone AS (
                DELETE FROM noetl.event
                WHERE execution_id >= $1 AND execution_id < $2 AND execution_id <> ALL ($3)
                RETURNING execution_id, event_id
            ), last AS (
                SELECT execution_id, max(event_id) AS event_id, count(*) AS events
                FROM gone GROUP BY execution_id
            )
            SELECT coalesce(sum(events), 0), array_agg(execution_id), array_agg(event_id) FROM last
            $query$
        INTO found_rows, executions, lasts USING low, high, kept;
        EXECUTE 'DELETE FROM noetl.result_ref WHERE execution_id >= $1 AND execution_id < $2'
            ' AND execution_id <> ALL ($3)'
        USING low, high, kept;
        GET DIAGNOSTICS removed = ROW_COUNT;
        IF found_rows <> parts.events OR removed <> parts.results THEN
            RAISE EXCEPTION USING ERRCODE = 'NA001';
        END IF;
        PERFORM set_config('enable_seqscan', 'off', true);
        -- No result comes without an event, so results need no look.
        FOREACH partition_name IN ARRAY ARRAY['event_default', 'event_' || week] LOOP
            IF to_regclass(format('noetl.%I', partition_name)) IS NOT NULL THEN
                EXECUTE format(
                    'LOCK TABLE noetl.%I IN SHARE ROW EXCLUSIVE MODE', partition_name
                );
                -- Behind the last event: what was deleted is still in the index.
                EXECUTE format($query$
                    SELECT EXISTS (
                        SELECT FROM unnest($1, $2) AS last (execution_id, event_id)
                        CROSS JOIN LATERAL (
                            SELECT FROM noetl.%I AS p
                            WHERE p.execution_id = last.execution_id
                              AND p.event_id > last.event_id
                            ORDER BY p.event_id LIMIT 1
                        ) AS newer
                    )
                    $query$, partition_name
                ) INTO is_newer USING executions, lasts;
                IF is_newer THEN
                    RAISE EXCEPTION USING ERRCODE = 'NA001';
                END IF;
            END IF;
        END LOOP;
    END IF;
    UPDATE noetl.manifest SET meta = meta || jsonb_build_object('dropped_at', now())
    WHERE execution_id = archive.execution_id AND manifest_id = archive_id;
    RETURN 'dropped';
EXCEPTION
    WHEN lock_not_available OR deadlock_detected THEN RETURN 'busy';
    -- More or fewer rows than were archived: everything above is undone.
    WHEN SQLSTATE 'NA001' THEN RETURN 'changed';
END
$$;
