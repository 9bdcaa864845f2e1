"""The compactor makes the partitions of the log ahead of time."""
