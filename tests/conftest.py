"""Registers the fixtures of tests/support for every test."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["support.postgres", "support.nats", "support.s3"]

# How long an example takes says how busy the machine is, and nothing of what the test is about.
settings.register_profile("noetl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("noetl")
