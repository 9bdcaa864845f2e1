"""The checkpointer closes the epochs of busy shards and records the committed ones."""
