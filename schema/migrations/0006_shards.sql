-- Shards that are handed over on request, and a number of shards that changes while all runs.

-- Who shall have the shard next: its owner lets it go, and the one named here takes it at once.
ALTER TABLE noetl.execution_shard ADD COLUMN wanted_runtime_id bigint;

-- A shard beyond the count is kept until nothing can be under way to it, then it is set aside. The
-- row stays, so that its epoch never begins again: a fence of long ago must not fit a new owner.
ALTER TABLE noetl.execution_shard ADD COLUMN retired_at timestamptz;

-- Every change of the shard count, asked for and done. `switch_id` parts the log: an event of
-- before has a smaller id and lies on a shard by the old count, one of after has a larger id.
CREATE TABLE noetl.resize (
    resize_id     bigint PRIMARY KEY,
    shards_from   integer NOT NULL,
    shards_to     integer NOT NULL CHECK (shards_to BETWEEN 1 AND 1024),
    requested_at  timestamptz NOT NULL DEFAULT now(),
    switch_id     bigint UNIQUE,
    switched_at   timestamptz,
    drained_at    timestamptz,
    refused       text
);
CREATE UNIQUE INDEX resize_open_idx ON noetl.resize ((true))
    WHERE switch_id IS NULL AND refused IS NULL;

GRANT SELECT ON noetl.resize TO noetl_broker, noetl_projection, noetl_compactor;
GRANT SELECT, INSERT ON noetl.resize TO noetl_api_gateway;
GRANT SELECT, UPDATE ON noetl.resize TO noetl_shard_manager;
-- To find an id above every event, and to see whether anything is left on a shard.
GRANT SELECT (shard_id, event_id) ON noetl.event TO noetl_shard_manager;
GRANT SELECT ON noetl.projection_checkpoint TO noetl_shard_manager;
GRANT SELECT (shard_id) ON noetl.inbox, noetl.command TO noetl_shard_manager;
