"""What a person at a terminal sees before a command is silent; a log does not have it."""

import os
import sys


def is_terminal() -> bool:
    """Whether stderr is a person's terminal.

    A notebook gives its commands a terminal, too, but keeps all that they print: it counts as
    a log.
    """
    return sys.stderr.isatty() and "JPY_PARENT_PID" not in os.environ


def announce(text: str) -> None:
    """On a terminal, print what starts now and how long it takes, before it is silent."""
    if is_terminal():
        print(text, file=sys.stderr, flush=True)
