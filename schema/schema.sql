CREATE SCHEMA noetl;

CREATE FUNCTION noetl.commit_batch(fence_shard integer[], fence_epoch bigint[], e_execution bigint[], e_id bigint[], e_key text[], e_shard integer[], e_type text[], e_status text[], e_node text[], e_command text[], e_loop bigint[], e_index integer[], e_attempt integer[], e_parent bigint[], e_parent_execution bigint[], e_catalog bigint[], e_epoch bigint[], e_context text[], e_result text[], e_meta text[], e_error text[], x_execution bigint[], x_command text[], x_worker text[], x_all bigint[], c_execution bigint[], c_command text[], c_shard integer[], c_step text[], c_attempt integer[], c_pool text[], c_priority integer[], c_delay double precision[], c_payload bytea[], r_execution bigint[], r_ref bigint[], r_parent bigint[], r_step text[], r_tier text[], r_uri text[], r_media text[], r_bytes bigint[], r_sha256 bytea[], r_inline bytea[], inbox_ids bigint[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    held integer;
    ended integer;
    refused integer;
BEGIN
    SELECT count(*) INTO held FROM (
        SELECT 1 FROM noetl.execution_shard s
        JOIN unnest(fence_shard, fence_epoch) AS f (shard_id, epoch)
            ON s.shard_id = f.shard_id AND s.epoch = f.epoch
        WHERE s.role = 'broker'
        -- Everyone who locks several shards does it in this order: no deadlock.
        ORDER BY s.shard_id
        FOR SHARE OF s
    ) AS fenced;
    IF held <> cardinality(fence_shard) THEN
        RAISE EXCEPTION 'a shard of this batch has another owner' USING ERRCODE = 'NS001';
    END IF;

    INSERT INTO noetl.event (
        execution_id, event_id, event_key, shard_id, event_type, status, node_name, command_id,
        loop_id, iter_index, attempt, parent_event_id, parent_execution_id, catalog_id, epoch_id,
        context, result, meta, error
    )
    SELECT
        execution_id, event_id, event_key, shard_id, event_type, status, node_name, command_id,
        loop_id, iter_index, attempt, parent_event_id, parent_execution_id, catalog_id, epoch_id,
        context::jsonb, result::jsonb, meta::jsonb, error::jsonb
    FROM unnest(
        e_execution, e_id, e_key, e_shard, e_type, e_status, e_node, e_command, e_loop, e_index,
        e_attempt, e_parent, e_parent_execution, e_catalog, e_epoch, e_context, e_result, e_meta,
        e_error
    ) AS u (
        execution_id, event_id, event_key, shard_id, event_type, status, node_name, command_id,
        loop_id, iter_index, attempt, parent_event_id, parent_execution_id, catalog_id, epoch_id,
        context, result, meta, error
    );

    IF cardinality(x_execution) > 0 THEN
        WITH gone AS (
            DELETE FROM noetl.command c
            USING unnest(x_execution, x_command, x_worker) AS u (execution_id, command_id, worker_id)
            WHERE c.execution_id = ANY (ARRAY[u.execution_id])
              AND c.command_id = ANY (ARRAY[u.command_id])
              AND (u.worker_id IS NULL OR c.worker_id IS NULL OR c.worker_id = u.worker_id)
            RETURNING 1
        )
        SELECT count(*) INTO ended FROM gone;
        IF ended < cardinality(x_execution) THEN
            SELECT count(*) INTO refused
            FROM noetl.command c
            JOIN unnest(x_execution, x_command) AS u (execution_id, command_id)
                ON c.execution_id = ANY (ARRAY[u.execution_id])
                AND c.command_id = ANY (ARRAY[u.command_id]);
            IF refused > 0 THEN
                RAISE EXCEPTION 'a command of this batch is held by another worker'
                    USING ERRCODE = 'NS002';
            END IF;
        END IF;
    END IF;

    IF cardinality(c_execution) > 0 THEN
        INSERT INTO noetl.command (
            execution_id, command_id, shard_id, step, attempt, pool, priority, available_at, payload
        )
        SELECT execution_id, command_id, shard_id, step, attempt, pool, priority,
               now() + make_interval(secs => delay), payload
        FROM unnest(
            c_execution, c_command, c_shard, c_step, c_attempt, c_pool, c_priority, c_delay, c_payload
        ) AS u (
            execution_id, command_id, shard_id, step, attempt, pool, priority, delay, payload
        );
    END IF;

    IF cardinality(r_execution) > 0 THEN
        INSERT INTO noetl.result_ref (
            execution_id, ref_id, parent_ref_id, step, store_tier, physical_uri, media_type, bytes,
            sha256, inline
        )
        SELECT * FROM unnest(
            r_execution, r_ref, r_parent, r_step, r_tier, r_uri, r_media, r_bytes, r_sha256, r_inline
        );
    END IF;

    IF cardinality(x_all) > 0 THEN
        DELETE FROM noetl.command WHERE execution_id = ANY (x_all);
    END IF;
    IF cardinality(inbox_ids) > 0 THEN
        DELETE FROM noetl.inbox WHERE inbox_id = ANY (inbox_ids);
    END IF;
END
$$;

CREATE FUNCTION noetl.default_weight(low bigint, high bigint, rows_max bigint, OUT rows bigint, OUT bytes bigint) RETURNS record
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION noetl.discard_archive(archive_id bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION noetl.drop_archived(archive_id bigint) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '500ms'
    SET enable_seqscan TO 'on'
    AS $_$
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
$_$;

CREATE FUNCTION noetl.ensure_partition(parent text, partition_name text, lower_id bigint, upper_id bigint) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '500ms'
    AS $_$
DECLARE
    is_occupied boolean;
BEGIN
    IF parent NOT IN ('event', 'result_ref') OR lower_id >= upper_id
       OR partition_name !~ ('^' || parent || '_[0-9]{4}w[0-9]{2}$') THEN
        RAISE EXCEPTION '% from % to % is no partition of %',
            partition_name, lower_id, upper_id, parent USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('noetl.ensure_partition'));
    IF to_regclass(format('noetl.%I', partition_name)) IS NOT NULL THEN
        RETURN 'exists';
    END IF;
    EXECUTE format(
        'SELECT EXISTS (SELECT 1 FROM noetl.%I WHERE execution_id >= $1 AND execution_id < $2)',
        parent || '_default'
    ) INTO is_occupied USING lower_id, upper_id;
    IF is_occupied THEN
        RETURN 'occupied';
    END IF;
    EXECUTE format('CREATE TABLE noetl.%I (LIKE noetl.%I INCLUDING ALL)', partition_name, parent);
    EXECUTE format(
        'ALTER TABLE noetl.%I ATTACH PARTITION noetl.%I FOR VALUES FROM (%s) TO (%s)',
        parent, partition_name, lower_id, upper_id
    );
    RETURN 'created';
EXCEPTION
    -- A row of the range came in after we looked: attaching refuses, and nothing was changed.
    WHEN check_violation THEN RETURN 'occupied';
    WHEN lock_not_available THEN RETURN 'busy';
END
$_$;

CREATE FUNCTION noetl.partition_tails(week text) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;

CREATE FUNCTION noetl.query(statement text, width integer, row_limit integer, bytes_max bigint) RETURNS SETOF text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'noetl', 'pg_catalog', 'pg_temp'
    AS $_$
DECLARE
    names text := (SELECT string_agg('c' || n, ', ' ORDER BY n) FROM generate_series(1, width) AS n);
    line text;
    total bigint := 0;
BEGIN
    IF current_user <> 'noetl_query' THEN
        RAISE EXCEPTION 'noetl.query must belong to the role noetl_query, not to %', current_user;
    END IF;
    FOR line IN EXECUTE format(
        E'SELECT json_build_array(%1$s)::text FROM (%2$s\n) AS asked (%1$s) LIMIT %3$s',
        names, statement, row_limit
    ) LOOP
        total := total + octet_length(line);
        IF total > bytes_max THEN
            RAISE EXCEPTION 'the answer has more than % bytes', bytes_max
                USING ERRCODE = 'program_limit_exceeded';
        END IF;
        RETURN NEXT line;
    END LOOP;
END
$_$;

CREATE FUNCTION noetl.remove_expired(executions bigint[], refs bigint[]) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION noetl.require_start(executions bigint[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION noetl.set_expiries(executions bigint[], refs bigint[], ttls double precision[]) RETURNS void
    LANGUAGE plpgsql
    AS $_$
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
$_$;

CREATE FUNCTION noetl.silence_allowed(runtime jsonb, usual_seconds double precision) RETURNS interval
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
SELECT make_interval(secs => greatest(usual_seconds, CASE
    WHEN jsonb_typeof(runtime -> 'heartbeat_interval_seconds') = 'number'
    THEN least(3 * (runtime ->> 'heartbeat_interval_seconds')::double precision, 300)
END))
$$;

CREATE FUNCTION noetl.vnode(execution_id bigint) RETURNS integer
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN ((((((((((execution_id & '4294967295'::bigint) # ((execution_id >> 32) & '4294967295'::bigint)) * 73244475) & '4294967295'::bigint) # (((((execution_id & '4294967295'::bigint) # ((execution_id >> 32) & '4294967295'::bigint)) * 73244475) & '4294967295'::bigint) >> 16)) * 73244475) & '4294967295'::bigint) # ((((((((execution_id & '4294967295'::bigint) # ((execution_id >> 32) & '4294967295'::bigint)) * 73244475) & '4294967295'::bigint) # (((((execution_id & '4294967295'::bigint) # ((execution_id >> 32) & '4294967295'::bigint)) * 73244475) & '4294967295'::bigint) >> 16)) * 73244475) & '4294967295'::bigint) >> 16)) % (1024)::bigint))::integer;

CREATE TABLE noetl.api_key (
    key_id text NOT NULL,
    sha256 bytea NOT NULL,
    name text NOT NULL,
    scopes text[] DEFAULT '{}'::text[] NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    role text DEFAULT 'reader'::text NOT NULL,
    CONSTRAINT api_key_role_check CHECK ((role = ANY (ARRAY['reader'::text, 'operator'::text, 'admin'::text])))
);

CREATE TABLE noetl.audit (
    audit_id bigint NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    execution_id bigint,
    subject text,
    details jsonb,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE noetl.audit ALTER COLUMN audit_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME noetl.audit_audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE noetl.catalog (
    catalog_id bigint NOT NULL,
    path text NOT NULL,
    version integer NOT NULL,
    content text NOT NULL,
    sha256 bytea NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT catalog_version_check CHECK ((version > 0))
);

CREATE TABLE noetl.checkpoint (
    execution_id bigint NOT NULL,
    shard_id integer NOT NULL,
    epoch bigint NOT NULL,
    last_event_id bigint NOT NULL,
    committed_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE noetl.command (
    execution_id bigint NOT NULL,
    command_id text NOT NULL,
    shard_id integer NOT NULL,
    step text NOT NULL,
    status text DEFAULT 'pending'::text NOT NULL,
    attempt integer DEFAULT 1 NOT NULL,
    max_attempts integer DEFAULT 5 NOT NULL,
    pool text DEFAULT 'cpu'::text NOT NULL,
    priority integer DEFAULT 0 NOT NULL,
    available_at timestamp with time zone DEFAULT now() NOT NULL,
    worker_id text,
    lease_until timestamp with time zone,
    last_heartbeat timestamp with time zone,
    target_worker text,
    target_until timestamp with time zone,
    payload bytea NOT NULL,
    meta jsonb,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    requires text[],
    given_back boolean DEFAULT false NOT NULL,
    CONSTRAINT command_status_check CHECK ((status = ANY (ARRAY['pending'::text, 'leased'::text, 'held'::text])))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='500', autovacuum_vacuum_cost_delay='0');

CREATE TABLE noetl.credential (
    name text NOT NULL,
    type text NOT NULL,
    key_id text NOT NULL,
    nonce bytea NOT NULL,
    ciphertext bytea NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE noetl.dead_letter (
    dead_letter_id bigint NOT NULL,
    shard_id integer,
    execution_id bigint,
    source text NOT NULL,
    body bytea NOT NULL,
    reason text NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE noetl.dead_letter ALTER COLUMN dead_letter_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME noetl.dead_letter_dead_letter_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE noetl.event (
    execution_id bigint NOT NULL,
    event_id bigint NOT NULL,
    event_key text NOT NULL,
    shard_id integer NOT NULL,
    event_type text NOT NULL,
    status text,
    node_name text,
    command_id text,
    loop_id bigint,
    iter_index integer,
    attempt integer,
    parent_event_id bigint,
    parent_execution_id bigint,
    catalog_id bigint,
    epoch_id bigint,
    context jsonb,
    result jsonb,
    meta jsonb,
    error jsonb,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT chk_event_result_shape CHECK (((result IS NULL) OR ((jsonb_typeof(result) = 'object'::text) AND (result ? 'status'::text) AND ((result - '{status,reference,parent_ref,context}'::text[]) = '{}'::jsonb) AND (pg_column_size(result) <= 8192))))
)
PARTITION BY RANGE (execution_id);

CREATE TABLE noetl.event_default (
    execution_id bigint CONSTRAINT event_execution_id_not_null NOT NULL,
    event_id bigint CONSTRAINT event_event_id_not_null NOT NULL,
    event_key text CONSTRAINT event_event_key_not_null NOT NULL,
    shard_id integer CONSTRAINT event_shard_id_not_null NOT NULL,
    event_type text CONSTRAINT event_event_type_not_null NOT NULL,
    status text,
    node_name text,
    command_id text,
    loop_id bigint,
    iter_index integer,
    attempt integer,
    parent_event_id bigint,
    parent_execution_id bigint,
    catalog_id bigint,
    epoch_id bigint,
    context jsonb,
    result jsonb,
    meta jsonb,
    error jsonb,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT event_created_at_not_null NOT NULL,
    CONSTRAINT chk_event_result_shape CHECK (((result IS NULL) OR ((jsonb_typeof(result) = 'object'::text) AND (result ? 'status'::text) AND ((result - '{status,reference,parent_ref,context}'::text[]) = '{}'::jsonb) AND (pg_column_size(result) <= 8192))))
);

CREATE TABLE noetl.execution (
    execution_id bigint NOT NULL,
    catalog_id bigint NOT NULL,
    path text NOT NULL,
    version integer NOT NULL,
    shard_id integer NOT NULL,
    status text NOT NULL,
    state jsonb NOT NULL,
    ctx jsonb NOT NULL,
    progress jsonb NOT NULL,
    waiting_on text,
    last_event_type text NOT NULL,
    last_node_name text,
    last_projected_event_id bigint NOT NULL,
    parent_execution_id bigint,
    error jsonb,
    started_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone,
    waits_for bigint[]
)
WITH (fillfactor='70');

CREATE TABLE noetl.execution_shard (
    role text NOT NULL,
    shard_id integer NOT NULL,
    owner_runtime_id bigint,
    owner_instance text,
    epoch bigint DEFAULT 0 NOT NULL,
    leased_until timestamp with time zone,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    wanted_runtime_id bigint,
    retired_at timestamp with time zone,
    CONSTRAINT execution_shard_role_check CHECK ((role = ANY (ARRAY['broker'::text, 'projection'::text])))
)
WITH (fillfactor='50');

CREATE TABLE noetl.idempotency (
    idempotency_key text NOT NULL,
    fingerprint bytea NOT NULL,
    execution_id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE noetl.inbox (
    inbox_id bigint NOT NULL,
    shard_id integer NOT NULL,
    body bytea NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    execution_id bigint
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='500');

ALTER TABLE noetl.inbox ALTER COLUMN inbox_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME noetl.inbox_inbox_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE noetl.leader (
    role text NOT NULL,
    owner_runtime_id bigint,
    epoch bigint DEFAULT 0 NOT NULL,
    leased_until timestamp with time zone
)
WITH (fillfactor='50');

CREATE TABLE noetl.manifest (
    execution_id bigint NOT NULL,
    manifest_id bigint NOT NULL,
    kind text NOT NULL,
    step text,
    item_count bigint NOT NULL,
    part_count integer NOT NULL,
    sha256 bytea,
    meta jsonb,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT manifest_kind_check CHECK ((kind = ANY (ARRAY['collection'::text, 'pages'::text, 'archive'::text])))
);

CREATE TABLE noetl.manifest_part (
    execution_id bigint NOT NULL,
    manifest_id bigint NOT NULL,
    part_index integer NOT NULL,
    item_count integer NOT NULL,
    store_tier text NOT NULL,
    physical_uri text,
    bytes bigint NOT NULL,
    sha256 bytea,
    inline bytea,
    ref_id bigint,
    source text,
    lower_id bigint,
    upper_id bigint,
    CONSTRAINT manifest_part_check CHECK (((store_tier = 'db'::text) = (inline IS NOT NULL))),
    CONSTRAINT manifest_part_check1 CHECK (((store_tier = ANY (ARRAY['db'::text, 'result'::text])) = (physical_uri IS NULL))),
    CONSTRAINT manifest_part_result_check CHECK (((store_tier = 'result'::text) = (ref_id IS NOT NULL))),
    CONSTRAINT manifest_part_source_check CHECK ((source = ANY (ARRAY['event'::text, 'result_ref'::text]))),
    CONSTRAINT manifest_part_store_tier_check CHECK ((store_tier = ANY (ARRAY['db'::text, 'pvc'::text, 'minio'::text, 's3'::text, 'gcs'::text, 'result'::text])))
);

CREATE TABLE noetl.metric (
    metric_id bigint NOT NULL,
    runtime_id bigint,
    name text NOT NULL,
    value double precision NOT NULL,
    labels jsonb,
    reported_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE noetl.metric ALTER COLUMN metric_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME noetl.metric_metric_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE noetl.projection_checkpoint (
    shard_id integer NOT NULL,
    last_projected_event_id bigint DEFAULT 0 NOT NULL,
    last_projected_at timestamp with time zone DEFAULT now() NOT NULL,
    lag_ms integer
)
WITH (fillfactor='50');

CREATE TABLE noetl.resize (
    resize_id bigint NOT NULL,
    shards_from integer NOT NULL,
    shards_to integer NOT NULL,
    requested_at timestamp with time zone DEFAULT now() NOT NULL,
    switch_id bigint,
    switched_at timestamp with time zone,
    drained_at timestamp with time zone,
    refused text,
    CONSTRAINT resize_shards_to_check CHECK (((shards_to >= 1) AND (shards_to <= 1024)))
);

CREATE TABLE noetl.result_ref (
    execution_id bigint NOT NULL,
    ref_id bigint NOT NULL,
    parent_ref_id bigint,
    step text NOT NULL,
    store_tier text NOT NULL,
    physical_uri text,
    media_type text DEFAULT 'application/json'::text NOT NULL,
    bytes bigint NOT NULL,
    sha256 bytea,
    inline bytea,
    preview text,
    expires_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    removed_at timestamp with time zone,
    CONSTRAINT result_ref_check CHECK (((store_tier = 'db'::text) = (inline IS NOT NULL))),
    CONSTRAINT result_ref_check1 CHECK (((store_tier = 'db'::text) = (physical_uri IS NULL))),
    CONSTRAINT result_ref_store_tier_check CHECK ((store_tier = ANY (ARRAY['db'::text, 'pvc'::text, 'minio'::text, 's3'::text, 'gcs'::text])))
)
PARTITION BY RANGE (execution_id);

CREATE TABLE noetl.result_ref_default (
    execution_id bigint CONSTRAINT result_ref_execution_id_not_null NOT NULL,
    ref_id bigint CONSTRAINT result_ref_ref_id_not_null NOT NULL,
    parent_ref_id bigint,
    step text CONSTRAINT result_ref_step_not_null NOT NULL,
    store_tier text CONSTRAINT result_ref_store_tier_not_null NOT NULL,
    physical_uri text,
    media_type text DEFAULT 'application/json'::text CONSTRAINT result_ref_media_type_not_null NOT NULL,
    bytes bigint CONSTRAINT result_ref_bytes_not_null NOT NULL,
    sha256 bytea,
    inline bytea,
    preview text,
    expires_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT result_ref_created_at_not_null NOT NULL,
    removed_at timestamp with time zone,
    CONSTRAINT result_ref_check CHECK (((store_tier = 'db'::text) = (inline IS NOT NULL))),
    CONSTRAINT result_ref_check1 CHECK (((store_tier = 'db'::text) = (physical_uri IS NULL))),
    CONSTRAINT result_ref_store_tier_check CHECK ((store_tier = ANY (ARRAY['db'::text, 'pvc'::text, 'minio'::text, 's3'::text, 'gcs'::text])))
);

CREATE TABLE noetl.runtime (
    runtime_id bigint NOT NULL,
    name text NOT NULL,
    kind text NOT NULL,
    uri text,
    status text DEFAULT 'ready'::text NOT NULL,
    node integer,
    labels jsonb,
    capabilities jsonb,
    capacity integer,
    runtime jsonb,
    heartbeat timestamp with time zone DEFAULT now() NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    is_ours boolean DEFAULT false NOT NULL,
    CONSTRAINT runtime_node_check CHECK (((node >= 0) AND (node <= 1023))),
    CONSTRAINT runtime_status_check CHECK ((status = ANY (ARRAY['ready'::text, 'draining'::text, 'offline'::text])))
)
WITH (fillfactor='50');

CREATE TABLE noetl.schedule (
    schedule_id bigint NOT NULL,
    path text NOT NULL,
    cron text NOT NULL,
    timezone text DEFAULT 'UTC'::text NOT NULL,
    payload jsonb,
    enabled boolean DEFAULT true NOT NULL,
    next_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE noetl.schema_migration (
    name text NOT NULL,
    sha256 text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE noetl.schema_migration_statement (
    name text NOT NULL,
    number integer NOT NULL,
    sha256 text NOT NULL,
    done_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE noetl.setting (
    name text NOT NULL,
    value jsonb NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE noetl.timer (
    execution_id bigint NOT NULL,
    timer text NOT NULL,
    due_at timestamp with time zone NOT NULL
);

ALTER TABLE ONLY noetl.event ATTACH PARTITION noetl.event_default DEFAULT;

ALTER TABLE ONLY noetl.result_ref ATTACH PARTITION noetl.result_ref_default DEFAULT;

ALTER TABLE ONLY noetl.api_key
    ADD CONSTRAINT api_key_pkey PRIMARY KEY (key_id);

ALTER TABLE ONLY noetl.api_key
    ADD CONSTRAINT api_key_sha256_key UNIQUE (sha256);

ALTER TABLE ONLY noetl.audit
    ADD CONSTRAINT audit_pkey PRIMARY KEY (audit_id);

ALTER TABLE ONLY noetl.catalog
    ADD CONSTRAINT catalog_path_version_key UNIQUE (path, version);

ALTER TABLE ONLY noetl.catalog
    ADD CONSTRAINT catalog_pkey PRIMARY KEY (catalog_id);

ALTER TABLE ONLY noetl.checkpoint
    ADD CONSTRAINT checkpoint_pkey PRIMARY KEY (execution_id, epoch);

ALTER TABLE ONLY noetl.command
    ADD CONSTRAINT command_pkey PRIMARY KEY (execution_id, command_id);

ALTER TABLE ONLY noetl.credential
    ADD CONSTRAINT credential_pkey PRIMARY KEY (name);

ALTER TABLE ONLY noetl.dead_letter
    ADD CONSTRAINT dead_letter_pkey PRIMARY KEY (dead_letter_id);

ALTER TABLE ONLY noetl.event
    ADD CONSTRAINT event_pkey PRIMARY KEY (execution_id, event_id);

ALTER TABLE ONLY noetl.event_default
    ADD CONSTRAINT event_default_pkey PRIMARY KEY (execution_id, event_id);

ALTER TABLE ONLY noetl.execution
    ADD CONSTRAINT execution_pkey PRIMARY KEY (execution_id);

ALTER TABLE ONLY noetl.execution_shard
    ADD CONSTRAINT execution_shard_pkey PRIMARY KEY (role, shard_id);

ALTER TABLE ONLY noetl.idempotency
    ADD CONSTRAINT idempotency_pkey PRIMARY KEY (idempotency_key);

ALTER TABLE ONLY noetl.inbox
    ADD CONSTRAINT inbox_pkey PRIMARY KEY (inbox_id);

ALTER TABLE ONLY noetl.leader
    ADD CONSTRAINT leader_pkey PRIMARY KEY (role);

ALTER TABLE ONLY noetl.manifest_part
    ADD CONSTRAINT manifest_part_pkey PRIMARY KEY (execution_id, manifest_id, part_index);

ALTER TABLE ONLY noetl.manifest
    ADD CONSTRAINT manifest_pkey PRIMARY KEY (execution_id, manifest_id);

ALTER TABLE ONLY noetl.metric
    ADD CONSTRAINT metric_pkey PRIMARY KEY (metric_id);

ALTER TABLE ONLY noetl.projection_checkpoint
    ADD CONSTRAINT projection_checkpoint_pkey PRIMARY KEY (shard_id);

ALTER TABLE ONLY noetl.resize
    ADD CONSTRAINT resize_pkey PRIMARY KEY (resize_id);

ALTER TABLE ONLY noetl.resize
    ADD CONSTRAINT resize_switch_id_key UNIQUE (switch_id);

ALTER TABLE ONLY noetl.result_ref
    ADD CONSTRAINT result_ref_pkey PRIMARY KEY (execution_id, ref_id);

ALTER TABLE ONLY noetl.result_ref_default
    ADD CONSTRAINT result_ref_default_pkey PRIMARY KEY (execution_id, ref_id);

ALTER TABLE ONLY noetl.runtime
    ADD CONSTRAINT runtime_kind_name_key UNIQUE (kind, name);

ALTER TABLE ONLY noetl.runtime
    ADD CONSTRAINT runtime_node_key UNIQUE (node);

ALTER TABLE ONLY noetl.runtime
    ADD CONSTRAINT runtime_pkey PRIMARY KEY (runtime_id);

ALTER TABLE ONLY noetl.schedule
    ADD CONSTRAINT schedule_pkey PRIMARY KEY (schedule_id);

ALTER TABLE ONLY noetl.schema_migration
    ADD CONSTRAINT schema_migration_pkey PRIMARY KEY (name);

ALTER TABLE ONLY noetl.schema_migration_statement
    ADD CONSTRAINT schema_migration_statement_pkey PRIMARY KEY (name, number);

ALTER TABLE ONLY noetl.setting
    ADD CONSTRAINT setting_pkey PRIMARY KEY (name);

ALTER TABLE ONLY noetl.timer
    ADD CONSTRAINT timer_pkey PRIMARY KEY (execution_id, timer);

CREATE UNIQUE INDEX api_key_name_idx ON noetl.api_key USING btree (name) WHERE (revoked_at IS NULL);

CREATE INDEX audit_execution_idx ON noetl.audit USING btree (execution_id) WHERE (execution_id IS NOT NULL);

CREATE INDEX checkpoint_position_idx ON noetl.checkpoint USING btree (shard_id, last_event_id);

CREATE INDEX checkpoint_shard_idx ON noetl.checkpoint USING btree (shard_id, epoch);

CREATE INDEX command_leased_idx ON noetl.command USING btree (lease_until) WHERE (status = 'leased'::text);

CREATE INDEX command_pending_idx ON noetl.command USING btree (pool, priority DESC, available_at) WHERE (status = 'pending'::text);

CREATE INDEX command_target_idx ON noetl.command USING btree (target_worker, priority DESC, available_at) WHERE ((status = 'pending'::text) AND (target_worker IS NOT NULL));

CREATE INDEX dead_letter_execution_idx ON noetl.dead_letter USING btree (execution_id);

CREATE INDEX dead_letter_flag_idx ON noetl.dead_letter USING btree (execution_id) WHERE (source = 'reaper'::text);

CREATE INDEX event_checkpoint_idx ON ONLY noetl.event USING btree (shard_id, event_id) WHERE (event_type = 'checkpoint.committed'::text);

CREATE INDEX event_default_event_checkpoint_idx ON noetl.event_default USING btree (shard_id, event_id) WHERE (event_type = 'checkpoint.committed'::text);

CREATE UNIQUE INDEX event_key_idx ON ONLY noetl.event USING btree (execution_id, event_key);

CREATE UNIQUE INDEX event_default_execution_id_event_key_idx ON noetl.event_default USING btree (execution_id, event_key);

CREATE INDEX event_loop_idx ON ONLY noetl.event USING btree (execution_id, loop_id, iter_index) WHERE (loop_id IS NOT NULL);

CREATE INDEX event_default_execution_id_loop_id_iter_index_idx ON noetl.event_default USING btree (execution_id, loop_id, iter_index) WHERE (loop_id IS NOT NULL);

CREATE INDEX event_shard_idx ON ONLY noetl.event USING btree (shard_id, event_id);

CREATE INDEX event_default_shard_id_event_id_idx ON noetl.event_default USING btree (shard_id, event_id);

CREATE INDEX execution_open_idx ON noetl.execution USING btree (execution_id) WHERE (status = ANY (ARRAY['PENDING'::text, 'RUNNING'::text, 'PAUSED'::text]));

CREATE INDEX execution_parent_idx ON noetl.execution USING btree (parent_execution_id) WHERE (parent_execution_id IS NOT NULL);

CREATE INDEX execution_path_idx ON noetl.execution USING btree (path, started_at DESC);

CREATE INDEX execution_recent_idx ON noetl.execution USING btree (started_at DESC, execution_id DESC);

CREATE INDEX execution_status_idx ON noetl.execution USING btree (status, started_at DESC, execution_id DESC);

CREATE INDEX idempotency_age_idx ON noetl.idempotency USING btree (created_at);

CREATE INDEX inbox_execution_idx ON noetl.inbox USING btree (execution_id) WHERE (execution_id IS NOT NULL);

CREATE INDEX inbox_shard_idx ON noetl.inbox USING btree (shard_id, inbox_id);

CREATE INDEX manifest_archive_idx ON noetl.manifest USING btree (manifest_id) WHERE (kind = 'archive'::text);

CREATE INDEX manifest_part_archive_idx ON noetl.manifest_part USING btree (lower_id, upper_id) WHERE (lower_id IS NOT NULL);

CREATE INDEX manifest_part_range_idx ON noetl.manifest_part USING gist (int8range(lower_id, upper_id, '[]'::text)) WHERE (lower_id IS NOT NULL);

CREATE INDEX metric_component_idx ON noetl.metric USING btree (((labels ->> 'component'::text)), metric_id);

CREATE INDEX metric_kind_idx ON noetl.metric USING btree (((labels ->> 'kind'::text)), metric_id);

CREATE INDEX metric_named_idx ON noetl.metric USING btree (name, metric_id);

CREATE INDEX metric_reported_idx ON noetl.metric USING btree (reported_at);

CREATE UNIQUE INDEX resize_open_idx ON noetl.resize USING btree ((true)) WHERE ((switch_id IS NULL) AND (refused IS NULL));

CREATE INDEX result_ref_parent_idx ON ONLY noetl.result_ref USING btree (execution_id, parent_ref_id) WHERE (parent_ref_id IS NOT NULL);

CREATE INDEX result_ref_default_execution_id_parent_ref_id_idx ON noetl.result_ref_default USING btree (execution_id, parent_ref_id) WHERE (parent_ref_id IS NOT NULL);

CREATE INDEX result_ref_expiry_idx ON ONLY noetl.result_ref USING btree (expires_at) WHERE ((expires_at IS NOT NULL) AND (removed_at IS NULL));

CREATE INDEX result_ref_default_expires_at_idx ON noetl.result_ref_default USING btree (expires_at) WHERE ((expires_at IS NOT NULL) AND (removed_at IS NULL));

CREATE INDEX runtime_status_idx ON noetl.runtime USING btree (status);

CREATE INDEX timer_due_idx ON noetl.timer USING btree (due_at);

ALTER INDEX noetl.event_checkpoint_idx ATTACH PARTITION noetl.event_default_event_checkpoint_idx;

ALTER INDEX noetl.event_key_idx ATTACH PARTITION noetl.event_default_execution_id_event_key_idx;

ALTER INDEX noetl.event_loop_idx ATTACH PARTITION noetl.event_default_execution_id_loop_id_iter_index_idx;

ALTER INDEX noetl.event_pkey ATTACH PARTITION noetl.event_default_pkey;

ALTER INDEX noetl.event_shard_idx ATTACH PARTITION noetl.event_default_shard_id_event_id_idx;

ALTER INDEX noetl.result_ref_parent_idx ATTACH PARTITION noetl.result_ref_default_execution_id_parent_ref_id_idx;

ALTER INDEX noetl.result_ref_expiry_idx ATTACH PARTITION noetl.result_ref_default_expires_at_idx;

ALTER INDEX noetl.result_ref_pkey ATTACH PARTITION noetl.result_ref_default_pkey;

GRANT USAGE ON SCHEMA noetl TO noetl_api_gateway;
GRANT USAGE ON SCHEMA noetl TO noetl_broker;
GRANT USAGE ON SCHEMA noetl TO noetl_worker;
GRANT USAGE ON SCHEMA noetl TO noetl_projection;
GRANT USAGE ON SCHEMA noetl TO noetl_shard_manager;
GRANT USAGE ON SCHEMA noetl TO noetl_checkpointer;
GRANT USAGE ON SCHEMA noetl TO noetl_compactor;
GRANT USAGE ON SCHEMA noetl TO noetl_reaper;
GRANT USAGE ON SCHEMA noetl TO noetl_query;

GRANT ALL ON FUNCTION noetl.commit_batch(fence_shard integer[], fence_epoch bigint[], e_execution bigint[], e_id bigint[], e_key text[], e_shard integer[], e_type text[], e_status text[], e_node text[], e_command text[], e_loop bigint[], e_index integer[], e_attempt integer[], e_parent bigint[], e_parent_execution bigint[], e_catalog bigint[], e_epoch bigint[], e_context text[], e_result text[], e_meta text[], e_error text[], x_execution bigint[], x_command text[], x_worker text[], x_all bigint[], c_execution bigint[], c_command text[], c_shard integer[], c_step text[], c_attempt integer[], c_pool text[], c_priority integer[], c_delay double precision[], c_payload bytea[], r_execution bigint[], r_ref bigint[], r_parent bigint[], r_step text[], r_tier text[], r_uri text[], r_media text[], r_bytes bigint[], r_sha256 bytea[], r_inline bytea[], inbox_ids bigint[]) TO noetl_broker;

REVOKE ALL ON FUNCTION noetl.default_weight(low bigint, high bigint, rows_max bigint, OUT rows bigint, OUT bytes bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION noetl.default_weight(low bigint, high bigint, rows_max bigint, OUT rows bigint, OUT bytes bigint) TO noetl_compactor;

REVOKE ALL ON FUNCTION noetl.discard_archive(archive_id bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION noetl.discard_archive(archive_id bigint) TO noetl_compactor;

REVOKE ALL ON FUNCTION noetl.drop_archived(archive_id bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION noetl.drop_archived(archive_id bigint) TO noetl_compactor;

REVOKE ALL ON FUNCTION noetl.ensure_partition(parent text, partition_name text, lower_id bigint, upper_id bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION noetl.ensure_partition(parent text, partition_name text, lower_id bigint, upper_id bigint) TO noetl_compactor;

REVOKE ALL ON FUNCTION noetl.partition_tails(week text) FROM PUBLIC;
GRANT ALL ON FUNCTION noetl.partition_tails(week text) TO noetl_compactor;

REVOKE ALL ON FUNCTION noetl.query(statement text, width integer, row_limit integer, bytes_max bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION noetl.query(statement text, width integer, row_limit integer, bytes_max bigint) TO noetl_api_gateway;

REVOKE ALL ON FUNCTION noetl.remove_expired(executions bigint[], refs bigint[]) FROM PUBLIC;
GRANT ALL ON FUNCTION noetl.remove_expired(executions bigint[], refs bigint[]) TO noetl_compactor;

REVOKE ALL ON FUNCTION noetl.require_start(executions bigint[]) FROM PUBLIC;
GRANT ALL ON FUNCTION noetl.require_start(executions bigint[]) TO noetl_broker;

REVOKE ALL ON FUNCTION noetl.set_expiries(executions bigint[], refs bigint[], ttls double precision[]) FROM PUBLIC;
GRANT ALL ON FUNCTION noetl.set_expiries(executions bigint[], refs bigint[], ttls double precision[]) TO noetl_broker;

GRANT SELECT ON TABLE noetl.api_key TO noetl_api_gateway;
GRANT SELECT ON TABLE noetl.api_key TO noetl_compactor;

GRANT SELECT,INSERT ON TABLE noetl.audit TO noetl_api_gateway;
GRANT INSERT ON TABLE noetl.audit TO noetl_broker;
GRANT INSERT ON TABLE noetl.audit TO noetl_worker;
GRANT INSERT ON TABLE noetl.audit TO noetl_projection;
GRANT INSERT ON TABLE noetl.audit TO noetl_shard_manager;
GRANT INSERT ON TABLE noetl.audit TO noetl_checkpointer;
GRANT SELECT,INSERT ON TABLE noetl.audit TO noetl_compactor;
GRANT INSERT ON TABLE noetl.audit TO noetl_reaper;
GRANT SELECT ON TABLE noetl.audit TO noetl_query;

GRANT SELECT,INSERT ON TABLE noetl.catalog TO noetl_api_gateway;
GRANT SELECT ON TABLE noetl.catalog TO noetl_broker;
GRANT SELECT ON TABLE noetl.catalog TO noetl_worker;
GRANT SELECT ON TABLE noetl.catalog TO noetl_projection;
GRANT SELECT ON TABLE noetl.catalog TO noetl_compactor;
GRANT SELECT ON TABLE noetl.catalog TO noetl_query;

GRANT SELECT ON TABLE noetl.checkpoint TO noetl_api_gateway;
GRANT SELECT,INSERT,DELETE ON TABLE noetl.checkpoint TO noetl_checkpointer;
GRANT SELECT ON TABLE noetl.checkpoint TO noetl_compactor;
GRANT SELECT ON TABLE noetl.checkpoint TO noetl_query;
GRANT SELECT ON TABLE noetl.checkpoint TO noetl_broker;

GRANT SELECT ON TABLE noetl.command TO noetl_api_gateway;
GRANT SELECT,INSERT,DELETE ON TABLE noetl.command TO noetl_broker;
GRANT SELECT,UPDATE ON TABLE noetl.command TO noetl_worker;
GRANT SELECT ON TABLE noetl.command TO noetl_reaper;
GRANT SELECT ON TABLE noetl.command TO noetl_compactor;
GRANT SELECT ON TABLE noetl.command TO noetl_query;

GRANT SELECT(shard_id) ON TABLE noetl.command TO noetl_shard_manager;

GRANT UPDATE(status) ON TABLE noetl.command TO noetl_broker;
GRANT SELECT(status) ON TABLE noetl.command TO noetl_shard_manager;

GRANT UPDATE(target_worker) ON TABLE noetl.command TO noetl_broker;

GRANT UPDATE(target_until) ON TABLE noetl.command TO noetl_broker;

GRANT UPDATE(requires) ON TABLE noetl.command TO noetl_broker;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.credential TO noetl_api_gateway;
GRANT SELECT ON TABLE noetl.credential TO noetl_worker;
GRANT SELECT ON TABLE noetl.credential TO noetl_compactor;

GRANT SELECT,DELETE ON TABLE noetl.dead_letter TO noetl_api_gateway;
GRANT SELECT,INSERT ON TABLE noetl.dead_letter TO noetl_broker;
GRANT SELECT,INSERT ON TABLE noetl.dead_letter TO noetl_projection;
GRANT SELECT ON TABLE noetl.dead_letter TO noetl_compactor;
GRANT SELECT,INSERT,DELETE ON TABLE noetl.dead_letter TO noetl_reaper;
GRANT SELECT ON TABLE noetl.dead_letter TO noetl_query;

GRANT SELECT ON TABLE noetl.event TO noetl_api_gateway;
GRANT SELECT,INSERT ON TABLE noetl.event TO noetl_broker;
GRANT SELECT ON TABLE noetl.event TO noetl_worker;
GRANT SELECT ON TABLE noetl.event TO noetl_projection;
GRANT SELECT ON TABLE noetl.event TO noetl_checkpointer;
GRANT SELECT ON TABLE noetl.event TO noetl_compactor;
GRANT SELECT ON TABLE noetl.event TO noetl_query;

GRANT SELECT(event_id) ON TABLE noetl.event TO noetl_shard_manager;

GRANT SELECT(shard_id) ON TABLE noetl.event TO noetl_shard_manager;

GRANT SELECT ON TABLE noetl.event_default TO noetl_compactor;
GRANT SELECT ON TABLE noetl.event_default TO noetl_query;

GRANT SELECT ON TABLE noetl.execution TO noetl_api_gateway;
GRANT SELECT ON TABLE noetl.execution TO noetl_broker;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.execution TO noetl_projection;
GRANT SELECT ON TABLE noetl.execution TO noetl_checkpointer;
GRANT SELECT ON TABLE noetl.execution TO noetl_reaper;
GRANT SELECT ON TABLE noetl.execution TO noetl_compactor;
GRANT SELECT ON TABLE noetl.execution TO noetl_query;

GRANT SELECT ON TABLE noetl.execution_shard TO noetl_api_gateway;
GRANT SELECT,UPDATE ON TABLE noetl.execution_shard TO noetl_broker;
GRANT SELECT,UPDATE ON TABLE noetl.execution_shard TO noetl_projection;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.execution_shard TO noetl_shard_manager;
GRANT SELECT ON TABLE noetl.execution_shard TO noetl_checkpointer;
GRANT SELECT ON TABLE noetl.execution_shard TO noetl_reaper;
GRANT SELECT ON TABLE noetl.execution_shard TO noetl_compactor;
GRANT SELECT ON TABLE noetl.execution_shard TO noetl_query;

GRANT SELECT,INSERT ON TABLE noetl.idempotency TO noetl_api_gateway;
GRANT SELECT,DELETE ON TABLE noetl.idempotency TO noetl_compactor;
GRANT SELECT ON TABLE noetl.idempotency TO noetl_query;

GRANT SELECT,INSERT ON TABLE noetl.inbox TO noetl_api_gateway;
GRANT SELECT,INSERT,DELETE ON TABLE noetl.inbox TO noetl_broker;
GRANT INSERT ON TABLE noetl.inbox TO noetl_worker;
GRANT SELECT,INSERT ON TABLE noetl.inbox TO noetl_reaper;
GRANT SELECT ON TABLE noetl.inbox TO noetl_compactor;
GRANT SELECT ON TABLE noetl.inbox TO noetl_query;

GRANT SELECT(shard_id) ON TABLE noetl.inbox TO noetl_shard_manager;

GRANT SELECT,INSERT,UPDATE ON TABLE noetl.leader TO noetl_api_gateway;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.leader TO noetl_broker;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.leader TO noetl_worker;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.leader TO noetl_projection;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.leader TO noetl_shard_manager;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.leader TO noetl_checkpointer;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.leader TO noetl_compactor;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.leader TO noetl_reaper;
GRANT SELECT ON TABLE noetl.leader TO noetl_query;

GRANT SELECT ON TABLE noetl.manifest TO noetl_api_gateway;
GRANT SELECT,INSERT ON TABLE noetl.manifest TO noetl_broker;
GRANT SELECT ON TABLE noetl.manifest TO noetl_worker;
GRANT SELECT,INSERT ON TABLE noetl.manifest TO noetl_compactor;
GRANT SELECT ON TABLE noetl.manifest TO noetl_query;

GRANT SELECT ON TABLE noetl.manifest_part TO noetl_api_gateway;
GRANT SELECT,INSERT ON TABLE noetl.manifest_part TO noetl_broker;
GRANT SELECT ON TABLE noetl.manifest_part TO noetl_worker;
GRANT SELECT,INSERT ON TABLE noetl.manifest_part TO noetl_compactor;
GRANT SELECT ON TABLE noetl.manifest_part TO noetl_query;

GRANT SELECT,INSERT ON TABLE noetl.metric TO noetl_api_gateway;
GRANT INSERT ON TABLE noetl.metric TO noetl_broker;
GRANT INSERT ON TABLE noetl.metric TO noetl_worker;
GRANT INSERT ON TABLE noetl.metric TO noetl_projection;
GRANT SELECT,INSERT,DELETE ON TABLE noetl.metric TO noetl_shard_manager;
GRANT INSERT ON TABLE noetl.metric TO noetl_checkpointer;
GRANT SELECT,INSERT ON TABLE noetl.metric TO noetl_compactor;
GRANT INSERT ON TABLE noetl.metric TO noetl_reaper;
GRANT SELECT ON TABLE noetl.metric TO noetl_query;

GRANT SELECT ON TABLE noetl.projection_checkpoint TO noetl_api_gateway;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.projection_checkpoint TO noetl_projection;
GRANT SELECT ON TABLE noetl.projection_checkpoint TO noetl_checkpointer;
GRANT SELECT ON TABLE noetl.projection_checkpoint TO noetl_compactor;
GRANT SELECT ON TABLE noetl.projection_checkpoint TO noetl_shard_manager;
GRANT SELECT ON TABLE noetl.projection_checkpoint TO noetl_query;

GRANT SELECT ON TABLE noetl.resize TO noetl_broker;
GRANT SELECT ON TABLE noetl.resize TO noetl_projection;
GRANT SELECT ON TABLE noetl.resize TO noetl_compactor;
GRANT SELECT,INSERT ON TABLE noetl.resize TO noetl_api_gateway;
GRANT SELECT,INSERT,UPDATE ON TABLE noetl.resize TO noetl_shard_manager;
GRANT SELECT ON TABLE noetl.resize TO noetl_query;

GRANT SELECT ON TABLE noetl.result_ref TO noetl_api_gateway;
GRANT SELECT,INSERT ON TABLE noetl.result_ref TO noetl_broker;
GRANT SELECT ON TABLE noetl.result_ref TO noetl_worker;
GRANT SELECT ON TABLE noetl.result_ref TO noetl_compactor;
GRANT SELECT ON TABLE noetl.result_ref TO noetl_query;

GRANT UPDATE(expires_at) ON TABLE noetl.result_ref TO noetl_broker;

GRANT SELECT ON TABLE noetl.result_ref_default TO noetl_compactor;
GRANT SELECT ON TABLE noetl.result_ref_default TO noetl_query;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.runtime TO noetl_api_gateway;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.runtime TO noetl_broker;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.runtime TO noetl_worker;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.runtime TO noetl_projection;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.runtime TO noetl_shard_manager;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.runtime TO noetl_checkpointer;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.runtime TO noetl_compactor;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.runtime TO noetl_reaper;
GRANT SELECT ON TABLE noetl.runtime TO noetl_query;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.schedule TO noetl_api_gateway;
GRANT SELECT ON TABLE noetl.schedule TO noetl_compactor;
GRANT SELECT ON TABLE noetl.schedule TO noetl_query;

GRANT SELECT ON TABLE noetl.schema_migration TO PUBLIC;
GRANT SELECT ON TABLE noetl.schema_migration TO noetl_compactor;
GRANT SELECT ON TABLE noetl.schema_migration TO noetl_query;

GRANT SELECT ON TABLE noetl.schema_migration_statement TO PUBLIC;
GRANT SELECT ON TABLE noetl.schema_migration_statement TO noetl_compactor;
GRANT SELECT ON TABLE noetl.schema_migration_statement TO noetl_query;

GRANT SELECT ON TABLE noetl.setting TO noetl_api_gateway;
GRANT SELECT ON TABLE noetl.setting TO noetl_broker;
GRANT SELECT ON TABLE noetl.setting TO noetl_worker;
GRANT SELECT ON TABLE noetl.setting TO noetl_projection;
GRANT SELECT,UPDATE ON TABLE noetl.setting TO noetl_shard_manager;
GRANT SELECT ON TABLE noetl.setting TO noetl_checkpointer;
GRANT SELECT ON TABLE noetl.setting TO noetl_compactor;
GRANT SELECT ON TABLE noetl.setting TO noetl_reaper;
GRANT SELECT ON TABLE noetl.setting TO noetl_query;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE noetl.timer TO noetl_broker;
GRANT SELECT ON TABLE noetl.timer TO noetl_reaper;
GRANT SELECT ON TABLE noetl.timer TO noetl_api_gateway;
GRANT SELECT ON TABLE noetl.timer TO noetl_query;
