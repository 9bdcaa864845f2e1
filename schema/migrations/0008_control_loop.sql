-- The runtime control loop: metrics that are reported and thinned out, dead letters that are retried
-- and discarded, executions that are flagged because nothing can move them, and questions in SQL.

CREATE INDEX metric_reported_idx ON noetl.metric (reported_at);
GRANT SELECT, DELETE ON noetl.metric TO noetl_shard_manager;
GRANT SELECT (shard_id, status) ON noetl.command TO noetl_shard_manager;

GRANT DELETE ON noetl.dead_letter TO noetl_api_gateway;
GRANT SELECT, INSERT, DELETE ON noetl.dead_letter TO noetl_reaper;
CREATE INDEX dead_letter_flag_idx ON noetl.dead_letter (execution_id) WHERE source = 'reaper';

-- Who asks in SQL reads as this role: everything but what is secret. It cannot log in.
DO $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('noetl roles'));
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'noetl_query') THEN
        CREATE ROLE noetl_query NOLOGIN;
    END IF;
    -- Without this, who is no superuser could not give the function below to the role.
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        EXECUTE format('GRANT noetl_query TO %I', current_user);
    END IF;
END
$$;
GRANT USAGE ON SCHEMA noetl TO noetl_query;
GRANT SELECT ON ALL TABLES IN SCHEMA noetl TO noetl_query;
REVOKE ALL ON noetl.credential, noetl.api_key FROM noetl_query;

-- Runs one query as its owner, noetl_query, and gives each row as a JSON array. A function that runs
-- as its owner is the one place where a query cannot change the role back (`set_config('role', ...)`
-- is refused there), so what it may see does not depend on who called. The statement stands inside
-- another one: only a SELECT can. The caller makes the transaction read-only and sets the timeout.
CREATE FUNCTION noetl.query(statement text, width integer, row_limit integer, bytes_max bigint)
RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = noetl, pg_catalog, pg_temp
AS $$
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
$$;
REVOKE ALL ON FUNCTION noetl.query FROM PUBLIC;
GRANT EXECUTE ON FUNCTION noetl.query TO noetl_api_gateway;
GRANT CREATE ON SCHEMA noetl TO noetl_query;
ALTER FUNCTION noetl.query OWNER TO noetl_query;
REVOKE CREATE ON SCHEMA noetl FROM noetl_query;
