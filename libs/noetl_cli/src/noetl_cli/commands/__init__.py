"""The commands, as typer sees them. Each says what it takes; the work is done elsewhere."""
