"""NATS: connection, streams, consuming. Only speed lives here: nothing is true because of NATS."""
