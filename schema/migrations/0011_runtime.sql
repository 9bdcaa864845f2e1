-- The runtime control loop, second part: who is shown, who waits for whom, who may ask in SQL.

-- A process of ours that died gives its node number back after a minute and is shown as offline
-- until it is forgotten. Without a number it would look like a process of another system.
ALTER TABLE noetl.runtime ADD COLUMN is_ours boolean NOT NULL DEFAULT false;

-- How long a process may be silent: what is usual, or three of the heartbeats that it promised.
CREATE FUNCTION noetl.silence_allowed(runtime jsonb, usual_seconds double precision)
RETURNS interval LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
SELECT make_interval(secs => greatest(usual_seconds, CASE
    WHEN jsonb_typeof(runtime -> 'heartbeat_interval_seconds') = 'number'
    THEN least(3 * (runtime ->> 'heartbeat_interval_seconds')::double precision, 300)
END))
$$;

-- Whom an execution waits for when all its commands are parked: the event after which that was so,
-- then the child executions; with no children it waits for a person, a signal or a moment. NULL:
-- something of it should be under way, or nobody knows. A row whose last event is another one by
-- now was written by a projection that does not know the column, and is looked at the long way.
ALTER TABLE noetl.execution ADD COLUMN waits_for bigint[];
UPDATE noetl.execution AS x SET waits_for = ARRAY[x.last_projected_event_id] || parked.children
FROM (
    SELECT o.execution_id,
           coalesce(array_agg(DISTINCT (c.value -> 'parked' ->> 'child')::bigint)
               FILTER (WHERE c.value -> 'parked' ? 'child'), '{}') AS children
    FROM noetl.execution AS o
    CROSS JOIN LATERAL jsonb_each(o.state -> 'commands') AS c
    WHERE o.status IN ('PENDING', 'RUNNING')
    GROUP BY o.execution_id
    HAVING bool_and(c.value ? 'parked')
) AS parked
WHERE x.execution_id = parked.execution_id AND x.status IN ('PENDING', 'RUNNING');

-- Whoever asks for the metrics of one process or kind gets them off an index, from the newest on.
CREATE INDEX metric_component_idx ON noetl.metric ((labels ->> 'component'), metric_id);
CREATE INDEX metric_kind_idx ON noetl.metric ((labels ->> 'kind'), metric_id);
CREATE INDEX metric_named_idx ON noetl.metric (name, metric_id);
DROP INDEX noetl.metric_name_idx;

-- Keys of the API. Who has the database makes and revokes them (`noetl api-key`); a gateway only
-- compares the digest of the key that it was shown.
ALTER TABLE noetl.api_key ADD COLUMN role text NOT NULL DEFAULT 'reader'
    CHECK (role IN ('reader', 'operator', 'admin'));
CREATE UNIQUE INDEX api_key_name_idx ON noetl.api_key (name) WHERE revoked_at IS NULL;
REVOKE INSERT, UPDATE, DELETE ON noetl.api_key FROM noetl_api_gateway;

-- What a read-only transaction does not prevent: locks that others wait for, or that fill the lock
-- table, and messages in the write-ahead log. Postgres gives these functions to everybody, so they
-- are taken from everybody in this database and given to the roles that need them. Only who owns
-- the functions can do that, a superuser: on a managed Postgres it stays as it is, and docs/adr/0026
-- says what that means.
DO $$
DECLARE
    one regprocedure;
BEGIN
    FOR one IN
        SELECT oid FROM pg_proc
        WHERE pronamespace = 'pg_catalog'::regnamespace
          AND (proname LIKE 'pg\_advisory\_%' OR proname LIKE 'pg\_try\_advisory\_%'
               OR proname = 'pg_logical_emit_message')
    LOOP
        BEGIN
            EXECUTE format(
                'GRANT EXECUTE ON FUNCTION %s TO %I, noetl_api_gateway, noetl_broker, noetl_worker,'
                ' noetl_projection, noetl_shard_manager, noetl_checkpointer, noetl_compactor,'
                ' noetl_reaper', one, current_user
            );
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', one);
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE NOTICE 'who asks in SQL may call %: only its owner can take that away', one;
        END;
    END LOOP;
END
$$;
