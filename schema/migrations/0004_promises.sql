-- What a client was promised can be found again: by the execution, before the broker has seen the
-- request, and by the key the client gave it, when the answer was lost on the way.

ALTER TABLE noetl.inbox ADD COLUMN execution_id bigint;
CREATE INDEX inbox_execution_idx ON noetl.inbox (execution_id) WHERE execution_id IS NOT NULL;
GRANT SELECT ON noetl.inbox TO noetl_api_gateway;

-- One row per key; it commits together with the inbox row of the execution it names.
CREATE TABLE noetl.idempotency (
    idempotency_key  text PRIMARY KEY,
    fingerprint      bytea NOT NULL,
    execution_id     bigint NOT NULL,
    created_at       timestamptz NOT NULL DEFAULT now()
);
GRANT SELECT, INSERT ON noetl.idempotency TO noetl_api_gateway;
GRANT SELECT ON noetl.idempotency TO noetl_compactor;
