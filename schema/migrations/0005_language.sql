-- What the whole language needs beside the log: timers, commands that are held back while their
-- execution is paused, and manifests that list results which are stored already.

-- Something that must happen at a moment: a wait is over, a step or an execution is out of time.
-- The reaper says when it is due, the broker acts on it and removes it.
CREATE TABLE noetl.timer (
    execution_id  bigint NOT NULL,
    timer         text NOT NULL,
    due_at        timestamptz NOT NULL,
    PRIMARY KEY (execution_id, timer)
);
CREATE INDEX timer_due_idx ON noetl.timer (due_at);
GRANT SELECT, INSERT, UPDATE, DELETE ON noetl.timer TO noetl_broker;
GRANT SELECT ON noetl.timer TO noetl_reaper, noetl_api_gateway;

ALTER TABLE noetl.command DROP CONSTRAINT command_status_check;
ALTER TABLE noetl.command ADD CONSTRAINT command_status_check
    CHECK (status IN ('pending', 'leased', 'held'));

-- A part is stored here, or it is a result of the same execution (`ref_id`).
ALTER TABLE noetl.manifest_part ADD COLUMN ref_id bigint;
ALTER TABLE noetl.manifest_part DROP CONSTRAINT manifest_part_store_tier_check;
ALTER TABLE noetl.manifest_part ADD CONSTRAINT manifest_part_store_tier_check
    CHECK (store_tier IN ('db', 'pvc', 'minio', 's3', 'gcs', 'result'));
ALTER TABLE noetl.manifest_part ADD CONSTRAINT manifest_part_result_check
    CHECK ((store_tier = 'result') = (ref_id IS NOT NULL));
ALTER TABLE noetl.manifest_part DROP CONSTRAINT manifest_part_check1;
ALTER TABLE noetl.manifest_part ADD CONSTRAINT manifest_part_check1
    CHECK ((store_tier IN ('db', 'result')) = (physical_uri IS NULL));

CREATE INDEX execution_parent_idx ON noetl.execution (parent_execution_id)
    WHERE parent_execution_id IS NOT NULL;
DROP INDEX noetl.execution_open_idx;
CREATE INDEX execution_open_idx ON noetl.execution (execution_id)
    WHERE status IN ('PENDING', 'RUNNING', 'PAUSED');

-- The broker starts children and tells parents: it puts messages into the inbox of any shard.
GRANT INSERT ON noetl.inbox TO noetl_broker;
-- It holds commands back while an execution is paused, and says when a result may go.
GRANT UPDATE (status) ON noetl.command TO noetl_broker;
GRANT UPDATE (expires_at) ON noetl.result_ref TO noetl_broker;
