"""Loads a service while its database is still being made, and runs it when it is told to.

    python -m noetl_cli.stack.preload noetl_broker.main

On a small machine the imports take as long as initdb; done at the same time, they cost nothing. The
word to go is one byte on stdin; an end of file without it means that nobody is there to give it.
"""

import sys
from importlib import import_module

GO = b"\n"


def main() -> None:
    service = import_module(sys.argv[1])
    if sys.stdin.buffer.read(len(GO)) == GO:
        service.main()


if __name__ == "__main__":
    main()
