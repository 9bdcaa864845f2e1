-- What is past retention goes to Parquet files and leaves the database; what has expired goes.

-- An expired result keeps its row, so that a reader is told when it expired; its payload is removed.
ALTER TABLE noetl.result_ref ADD COLUMN removed_at timestamptz;
CREATE INDEX result_ref_expiry_idx ON noetl.result_ref (expires_at)
    WHERE expires_at IS NOT NULL AND removed_at IS NULL;

-- An archive is a manifest of kind 'archive'; each of its parts is a file. `source` is the table
-- that its rows came from, `lower_id` and `upper_id` are the least and the greatest execution in it.
ALTER TABLE noetl.manifest_part
    ADD COLUMN source text CHECK (source IN ('event', 'result_ref')),
    ADD COLUMN lower_id bigint,
    ADD COLUMN upper_id bigint;
CREATE INDEX manifest_part_archive_idx ON noetl.manifest_part (lower_id, upper_id)
    WHERE lower_id IS NOT NULL;
CREATE INDEX manifest_archive_idx ON noetl.manifest (manifest_id) WHERE kind = 'archive';

-- The last event of each shard in one dated partition of the log; null without that partition.
-- Ids ascend within a shard, so whatever is appended later is found beyond these. It runs with the
-- rights of the owner, because nobody is granted a partition by itself.
CREATE FUNCTION noetl.partition_tails(week text) RETURNS jsonb
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tails jsonb;
BEGIN
    IF week !~ '^[0-9]{4}w[0-9]{2}$' OR to_regclass(format('noetl.%I', 'event_' || week)) IS NULL THEN
        RETURN NULL;
    END IF;
    EXECUTE format($query$
        WITH RECURSIVE shard AS (
            SELECT min(shard_id) AS shard_id FROM noetl.%1$I
            UNION ALL
            SELECT (SELECT min(p.shard_id) FROM noetl.%1$I AS p WHERE p.shard_id > shard.shard_id)
            FROM shard WHERE shard.shard_id IS NOT NULL
        )
        SELECT coalesce(jsonb_object_agg(shard.shard_id, (
            SELECT max(p.event_id) FROM noetl.%1$I AS p WHERE p.shard_id = shard.shard_id
        )), '{}')
        FROM shard WHERE shard.shard_id IS NOT NULL
        $query$, 'event_' || week
    ) INTO tails;
    RETURN tails;
END
$$;
REVOKE ALL ON FUNCTION noetl.partition_tails FROM PUBLIC;

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
-- or when too much of it is kept ("drops" is false), the archived rows are deleted.
CREATE FUNCTION noetl.drop_archived(archive_id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '500ms'
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
        LOCK TABLE ONLY noetl.event IN ACCESS EXCLUSIVE MODE;
        LOCK TABLE ONLY noetl.result_ref IN ACCESS EXCLUSIVE MODE;
        partition_name := 'event_' || week;
        IF to_regclass(format('noetl.%I', partition_name)) IS NOT NULL THEN
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
                        LIMIT 1
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
            -- Rows of the week that came before its partition are in the DEFAULT one.
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
        -- Appends to these executions wait until it is over; the rest of the log goes on.
        FOREACH source IN ARRAY ARRAY['event', 'result_ref'] LOOP
            FOREACH partition_name IN ARRAY ARRAY[source || '_default', source || '_' || week] LOOP
                IF to_regclass(format('noetl.%I', partition_name)) IS NOT NULL THEN
                    EXECUTE format(
                        'LOCK TABLE noetl.%I IN SHARE ROW EXCLUSIVE MODE', partition_name
                    );
                END IF;
            END LOOP;
        END LOOP;
        FOREACH source IN ARRAY ARRAY['event', 'result_ref'] LOOP
            EXECUTE format(
                'DELETE FROM noetl.%I WHERE execution_id >= $1 AND execution_id < $2'
                ' AND execution_id <> ALL ($3)', source
            ) USING low, high, kept;
            GET DIAGNOSTICS removed = ROW_COUNT;
            IF removed <> (CASE source WHEN 'event' THEN parts.events ELSE parts.results END) THEN
                RAISE EXCEPTION USING ERRCODE = 'NA001';
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
REVOKE ALL ON FUNCTION noetl.drop_archived FROM PUBLIC;

-- Forgets an archive whose rows are still in the database; never one that is all there is.
CREATE FUNCTION noetl.discard_archive(archive_id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    owner_id bigint;
BEGIN
    DELETE FROM noetl.manifest
    WHERE kind = 'archive' AND manifest_id = archive_id AND NOT meta ? 'dropped_at'
    RETURNING execution_id INTO owner_id;
    IF owner_id IS NULL THEN
        RETURN false;
    END IF;
    DELETE FROM noetl.manifest_part WHERE execution_id = owner_id AND manifest_id = archive_id;
    RETURN true;
END
$$;
REVOKE ALL ON FUNCTION noetl.discard_archive FROM PUBLIC;

-- Takes the payload out of rows whose time is over. A file of a tier is gone before this is said.
CREATE FUNCTION noetl.remove_expired(executions bigint[], refs bigint[]) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    removed bigint;
BEGIN
    UPDATE noetl.result_ref AS r
    SET removed_at = now(), preview = NULL,
        inline = CASE WHEN r.store_tier = 'db' THEN ''::bytea END
    FROM unnest(executions, refs) AS u (execution_id, ref_id)
    WHERE r.execution_id = u.execution_id AND r.ref_id = u.ref_id
      AND r.expires_at <= now() AND r.removed_at IS NULL;
    GET DIAGNOSTICS removed = ROW_COUNT;
    RETURN removed;
END
$$;
REVOKE ALL ON FUNCTION noetl.remove_expired FROM PUBLIC;

GRANT EXECUTE ON FUNCTION
    noetl.partition_tails, noetl.drop_archived, noetl.discard_archive, noetl.remove_expired
    TO noetl_compactor;
GRANT INSERT ON noetl.manifest, noetl.manifest_part TO noetl_compactor;
GRANT DELETE ON noetl.idempotency TO noetl_compactor;
CREATE INDEX idempotency_age_idx ON noetl.idempotency (created_at);
