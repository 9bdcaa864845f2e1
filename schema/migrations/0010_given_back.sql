-- noetl: no transaction

-- Whether the worker has let go of the lease itself: it stops, or never heard that it has the row. Such
-- an attempt ends like one that was lost, but it does not count as a loss. A worker that does not know
-- the column leaves it false, which counts as it did before.
ALTER TABLE noetl.command ADD COLUMN given_back boolean NOT NULL DEFAULT false;

-- What is meant for a worker is looked for by its name, before what is for anyone.
CREATE INDEX CONCURRENTLY command_target_idx ON noetl.command (target_worker, priority DESC, available_at)
    WHERE status = 'pending' AND target_worker IS NOT NULL;
