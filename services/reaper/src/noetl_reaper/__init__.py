"""The reaper sees what stands still and tells the broker."""
