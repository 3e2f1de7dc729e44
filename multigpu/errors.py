"""What does a user see who made a mistake? One sentence, and the exit code 2."""


class UserError(Exception):
    """Something the user can mend.

    Its text is one sentence or two: what was wrong, what was expected, what to do.
    The command line and the scripts print it without a traceback and exit with code 2.
    A fault of our own is any other exception, and keeps its traceback.

    `quiet` is set where another rank already says the same thing.
    """

    def __init__(self, text: str, quiet: bool = False):
        super().__init__(text)
        self.quiet = quiet


def counted(number: int, thing: str) -> str:
    """1 GPU, 2 GPUs."""
    return f"{number} {thing}{'s' if number != 1 else ''}"
