"""What does a user see who made a mistake? One sentence, and the exit code 2."""

import difflib
import sys
import time
from collections.abc import Callable, Iterable

LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)  # what gloo says


def lost(error: BaseException | None) -> bool:
    """Does it say, or what caused it, that a connection to another rank was lost?"""
    while error is not None:
        if any(words in str(error) for words in LOST):
            return True
        error = error.__cause__ or error.__context__
    return False


class UserError(Exception):
    """Something the user can mend.

    Its text is one sentence or two: what was wrong, what was expected, what to do.
    The command line and the scripts print it without a traceback and exit with code 2.
    A fault of our own is any other exception, and keeps its traceback.

    `already_reported` is True on the ranks where another rank prints the same error.
    """

    def __init__(self, text: str, already_reported: bool = False):
        super().__init__(text)
        self.already_reported = already_reported


def pluralize(number: int, thing: str) -> str:
    """1 GPU, 2 GPUs."""
    return f"{number} {thing}{'s' if number != 1 else ''}"


def did_you_mean(word: object, known: Iterable[object], cutoff: float = 0.5) -> str:
    """ "did you mean 'this' or 'that'?", from the known names that look most like `word`; "" where none does."""
    near = difflib.get_close_matches(str(word), map(str, known), n=2, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


ENDINGS: list[
    Callable[[], None]
] = []  # of whoever has started further ranks: they end before a mistake is told


def tell(error: UserError) -> None:
    """Its sentence, once the ranks that this process has started are ended."""
    for end in ENDINGS:
        end()
    if error.already_reported:
        time.sleep(
            10
        )  # a launcher ends all ranks when the first one leaves: that should be the one that speaks
    else:
        print(f"error: {error}", file=sys.stderr, flush=True)


def report_user_errors() -> None:
    """An uncaught UserError is told as its sentence, without a traceback, from here on."""
    theirs = sys.excepthook
    if getattr(theirs, "plain", False):
        return

    def told(kind: type[BaseException], error: BaseException, trace: object) -> None:
        if isinstance(error, UserError):
            tell(error)
            return
        if lost(error) and not ENDINGS:
            time.sleep(
                5
            )  # another rank has died, and said why: the launcher, which is not this process, ends this one
        theirs(kind, error, trace)

    told.plain = True
    sys.excepthook = told
