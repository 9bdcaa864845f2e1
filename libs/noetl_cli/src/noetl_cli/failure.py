"""What the command line says when it cannot go on: one sentence, what to do, and an exit code."""

import signal

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMEOUT = 3


class CommandFailed(Exception):  # noqa: N818 - it is told to the user, who knows it is a failure
    """Ends the command. The message is for the user; there is never a traceback."""

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(Exception):  # noqa: N818 - not an error: somebody wished it
    """A signal ended the command, and everything it had opened is closed."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
