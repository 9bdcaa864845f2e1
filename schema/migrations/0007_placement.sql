-- What a worker must offer to be given a command (`gpu=true`, `tool:acme.mailer`): the lease query
-- compares it with what the worker has. NULL, as nearly always, is anyone. A broker that does not
-- know the column leaves it NULL, a worker that does not know it takes what it finds.
ALTER TABLE noetl.command ADD COLUMN requires text[];

-- The broker sets them in the transaction that inserts the command.
GRANT UPDATE (target_worker, target_until, requires) ON noetl.command TO noetl_broker;
