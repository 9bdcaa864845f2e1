"""The projection folds the event log into the status rows that clients read."""
