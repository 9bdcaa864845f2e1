"""Measures the system as it runs: real services, real Postgres, real NATS, all durability on."""
