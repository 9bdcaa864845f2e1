"""The HTTP door: clients start, watch and cancel executions here."""
