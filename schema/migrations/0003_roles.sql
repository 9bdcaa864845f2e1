-- Least privilege: one role per service, granted what that service touches and no more.
-- Only noetl_broker may insert into the log, and nobody may update or delete it; the compactor
-- makes partitions through a function that does nothing else.

DO $$
DECLARE
    service text;
BEGIN
    -- Roles belong to the cluster, so another database of it may have made them already.
    PERFORM pg_advisory_xact_lock(hashtext('noetl roles'));
    FOREACH service IN ARRAY ARRAY[
        'noetl_api_gateway', 'noetl_broker', 'noetl_worker', 'noetl_projection',
        'noetl_shard_manager', 'noetl_checkpointer', 'noetl_compactor', 'noetl_reaper'
    ] LOOP
        IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = service) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', service);
        END IF;
        EXECUTE format('GRANT USAGE ON SCHEMA noetl TO %I', service);
        EXECUTE format('GRANT SELECT ON noetl.setting TO %I', service);
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON noetl.runtime TO %I', service);
        EXECUTE format('GRANT SELECT, INSERT, UPDATE ON noetl.leader TO %I', service);
        EXECUTE format('GRANT INSERT ON noetl.metric, noetl.audit TO %I', service);
    END LOOP;
END
$$;

GRANT SELECT, INSERT ON noetl.catalog TO noetl_api_gateway;
GRANT SELECT ON
    noetl.event, noetl.execution, noetl.result_ref, noetl.manifest, noetl.manifest_part,
    noetl.execution_shard, noetl.projection_checkpoint, noetl.checkpoint, noetl.command,
    noetl.metric, noetl.audit, noetl.dead_letter TO noetl_api_gateway;
GRANT INSERT ON noetl.inbox TO noetl_api_gateway;
GRANT SELECT, INSERT, UPDATE, DELETE ON noetl.credential, noetl.api_key, noetl.schedule
    TO noetl_api_gateway;

GRANT SELECT ON noetl.catalog, noetl.execution TO noetl_broker;
GRANT SELECT, INSERT ON
    noetl.event, noetl.result_ref, noetl.manifest, noetl.manifest_part, noetl.dead_letter
    TO noetl_broker;
GRANT SELECT, INSERT, DELETE ON noetl.command TO noetl_broker;
GRANT SELECT, DELETE ON noetl.inbox TO noetl_broker;
GRANT SELECT, UPDATE ON noetl.execution_shard TO noetl_broker;
GRANT EXECUTE ON FUNCTION noetl.commit_batch TO noetl_broker;

GRANT SELECT ON noetl.catalog, noetl.event, noetl.result_ref, noetl.manifest, noetl.manifest_part,
    noetl.credential TO noetl_worker;
GRANT SELECT, UPDATE ON noetl.command TO noetl_worker;
GRANT INSERT ON noetl.inbox TO noetl_worker;

GRANT SELECT ON noetl.event, noetl.catalog TO noetl_projection;
GRANT SELECT, INSERT, UPDATE ON noetl.execution, noetl.projection_checkpoint TO noetl_projection;
GRANT SELECT, UPDATE ON noetl.execution_shard TO noetl_projection;
GRANT SELECT, INSERT ON noetl.dead_letter TO noetl_projection;

GRANT SELECT, INSERT, UPDATE, DELETE ON noetl.execution_shard TO noetl_shard_manager;
GRANT UPDATE ON noetl.setting TO noetl_shard_manager;

GRANT SELECT ON noetl.event, noetl.execution, noetl.execution_shard, noetl.projection_checkpoint
    TO noetl_checkpointer;
GRANT SELECT, INSERT, DELETE ON noetl.checkpoint TO noetl_checkpointer;

GRANT SELECT ON noetl.command, noetl.execution, noetl.execution_shard, noetl.inbox TO noetl_reaper;
GRANT INSERT ON noetl.inbox TO noetl_reaper;

GRANT EXECUTE ON FUNCTION noetl.ensure_partition TO noetl_compactor;
GRANT SELECT ON ALL TABLES IN SCHEMA noetl TO noetl_compactor;
