"""Pure: values in, values out. No clock, no randomness, no I/O, no environment."""
