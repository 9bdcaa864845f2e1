"""The shard-manager keeps the books of shards and processes, and tells who owns what."""
