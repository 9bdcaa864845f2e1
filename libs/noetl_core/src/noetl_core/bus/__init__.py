"""NATS: connection, publishing, consuming. Only speed lives here; nothing is true because NATS says so."""
