"""Postgres: one module a table, and the only Python with SQL. The caller owns the transaction."""
