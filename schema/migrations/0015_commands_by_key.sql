-- The batch of 0002, which now finds the commands that end by their key, also while the planner
-- believes that the queue is empty (store/command.py says why the keys are arrays).

-- One broker batch, all or nothing. Raises
--   NS001 when a shard of the batch is no longer ours (the fence),
--   NS002 when a command that ends here is held by another worker,
--   unique_violation when an event of the batch is recorded already.
-- FOR SHARE on the fence makes a new owner's claim wait until this commit is over: whatever the
-- new owner reads afterwards holds everything the old one wrote.
CREATE OR REPLACE FUNCTION noetl.commit_batch(
    fence_shard integer[], fence_epoch bigint[],
    e_execution bigint[], e_id bigint[], e_key text[], e_shard integer[], e_type text[],
    e_status text[], e_node text[], e_command text[], e_loop bigint[], e_index integer[],
    e_attempt integer[], e_parent bigint[], e_parent_execution bigint[], e_catalog bigint[],
    e_epoch bigint[], e_context text[], e_result text[], e_meta text[], e_error text[],
    x_execution bigint[], x_command text[], x_worker text[],
    x_all bigint[],
    c_execution bigint[], c_command text[], c_shard integer[], c_step text[], c_attempt integer[],
    c_pool text[], c_priority integer[], c_delay double precision[], c_payload bytea[],
    r_execution bigint[], r_ref bigint[], r_parent bigint[], r_step text[], r_tier text[],
    r_uri text[], r_media text[], r_bytes bigint[], r_sha256 bytea[], r_inline bytea[],
    inbox_ids bigint[]
) RETURNS void
LANGUAGE plpgsql AS $$
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
