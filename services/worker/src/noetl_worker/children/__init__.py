"""Warm child processes that run users' code away from the worker."""
