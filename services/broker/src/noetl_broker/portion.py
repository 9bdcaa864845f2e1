"""How much one commit takes: as much as is done in a fraction of a second.

A batch is whatever arrived while the last one was under way, so under load batches grow until they
take seconds. Everything behind them is that late then: the status that clients read, the close of
an epoch, the next command of a short execution. A batch that is a little smaller costs next to
nothing in throughput, because the price of a commit is spread over thousands of rows already.
"""

TURN_SECONDS = 0.2
BYTES_FIRST = 256 * 1024
BYTES_MIN = 64 * 1024
BYTES_MAX = 16 * 1024 * 1024


class Portion:
    def __init__(self) -> None:
        self.bytes_max = BYTES_FIRST

    def learn(self, *, size: int, seconds: float) -> None:
        """A batch of so many bytes took so long."""
        if seconds > TURN_SECONDS:
            fitting = int(size * TURN_SECONDS / seconds)
            self.bytes_max = max(BYTES_MIN, min(self.bytes_max, fitting))
        elif size * 2 > self.bytes_max and seconds < TURN_SECONDS / 2:
            self.bytes_max = min(BYTES_MAX, self.bytes_max * 2)
