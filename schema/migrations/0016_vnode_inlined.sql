-- The same numbers as 0002, in one expression, which Postgres puts in the place of the call. A look
-- at a hundred thousand rows by their shards waited half a second for calls.
--   a = (id & 4294967295) # ((id >> 32) & 4294967295)
--   b = (a * 73244475) & 4294967295
--   c = ((b # (b >> 16)) * 73244475) & 4294967295
--   the vnode is (c # (c >> 16)) % 1024
CREATE OR REPLACE FUNCTION noetl.vnode(execution_id bigint) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (
    (
        (((
            ((((execution_id & 4294967295) # ((execution_id >> 32) & 4294967295)) * 73244475) & 4294967295)
            # (((((execution_id & 4294967295) # ((execution_id >> 32) & 4294967295)) * 73244475) & 4294967295) >> 16)
        ) * 73244475) & 4294967295)
        # ((((
            ((((execution_id & 4294967295) # ((execution_id >> 32) & 4294967295)) * 73244475) & 4294967295)
            # (((((execution_id & 4294967295) # ((execution_id >> 32) & 4294967295)) * 73244475) & 4294967295) >> 16)
        ) * 73244475) & 4294967295) >> 16)
    ) % 1024
)::integer;
