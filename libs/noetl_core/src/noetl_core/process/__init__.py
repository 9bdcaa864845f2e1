"""The one life of a service: configuration, logs, telemetry, health, loops, a clean end."""
