"""The embedded stack: Postgres, NATS and every service as children of one supervisor."""
