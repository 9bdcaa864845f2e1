"""Decides what happens next and is the only writer of a shard of the event log."""
