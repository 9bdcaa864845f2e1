"""bench."""


def bench(name: str) -> None:
    """Measure."""
