"""Registers the fixtures of tests/support for every test."""

pytest_plugins = ["support.postgres", "support.nats", "support.s3"]
