"""The `noetl` command, and the stack it can run by itself: Postgres, NATS and every service."""
