-- noetl: no transaction

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

-- Whoever asks for the metrics of one process or kind gets them off an index, from the newest on.
CREATE INDEX CONCURRENTLY metric_component_idx ON noetl.metric ((labels ->> 'component'), metric_id);
CREATE INDEX CONCURRENTLY metric_kind_idx ON noetl.metric ((labels ->> 'kind'), metric_id);
CREATE INDEX CONCURRENTLY metric_named_idx ON noetl.metric (name, metric_id);
DROP INDEX CONCURRENTLY IF EXISTS noetl.metric_name_idx;

-- Keys of the API. Who has the database makes and revokes them (`noetl api-key`); a gateway only
-- compares the digest of the key that it was shown.
ALTER TABLE noetl.api_key ADD COLUMN role text NOT NULL DEFAULT 'reader'
    CHECK (role IN ('reader', 'operator', 'admin'));
CREATE UNIQUE INDEX CONCURRENTLY api_key_name_idx ON noetl.api_key (name) WHERE revoked_at IS NULL;
REVOKE INSERT, UPDATE, DELETE ON noetl.api_key FROM noetl_api_gateway;
