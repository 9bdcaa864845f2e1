-- noetl: no transaction

-- Recording an epoch reads the closes of epochs and nothing else of the log.
CREATE INDEX CONCURRENTLY event_checkpoint_idx ON noetl.event (shard_id, event_id)
    WHERE event_type = 'checkpoint.committed';

-- Where a shard's log is covered up to. Epochs are times of somebody's clock; events have an order.
CREATE INDEX CONCURRENTLY checkpoint_position_idx ON noetl.checkpoint (shard_id, last_event_id);

-- The new owner of a shard closes the epoch over what the last one recorded past it.
GRANT SELECT ON noetl.checkpoint TO noetl_broker;
