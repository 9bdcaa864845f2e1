-- The shard-manager wishes for the number of shards that is configured for a new system.
GRANT INSERT ON noetl.resize TO noetl_shard_manager;
