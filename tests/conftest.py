"""Registers the fixtures of tests/support for every test."""

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["support.postgres", "support.nats", "support.s3"]

# How long an example takes says how busy the machine is, and nothing of what the test is about. The
# examples are the same in each run, as those of the simulation are, unless others are asked for.
settings.register_profile(
    "noetl",
    deadline=None,
    derandomize="NOETL_SIMULATION_SEED" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("noetl")
