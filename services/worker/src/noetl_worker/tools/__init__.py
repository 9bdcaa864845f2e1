"""The tools a worker can run: one file each, found by kind in the registry."""
