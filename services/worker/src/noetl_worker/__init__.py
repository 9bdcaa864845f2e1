"""Leases commands, runs their tools and reports what happened."""
