"""Errors that the user can fix: printed as one sentence without a traceback, exit code 2."""

import difflib
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import NoReturn, Protocol

# What gloo writes when the process at the other end of a connection has ended.
CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# How Python and torch name what torchrun sets, in a program that was started without it.
SET_BY_TORCHRUN = (
    "KeyError: 'RANK'",
    "KeyError: 'LOCAL_RANK'",
    "KeyError: 'WORLD_SIZE'",
    "environment variable RANK expected, but not set",
)


class UserError(Exception):
    """An error that the user can fix.

    Its text is one or two sentences: what is wrong, what was expected, what to do.
    The command line and the scripts print it without a traceback and exit with code 2.
    A fault of this library raises another exception, which keeps its traceback.

    `already_reported` is True if another rank prints the same error.
    """

    def __init__(self, text: str, already_reported: bool = False):
        super().__init__(text)
        self.already_reported = already_reported

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback: IPython calls this method."""
        return wrapped(f"error: {self}")


def unsupported(name: str, text: str) -> type:
    """A class in place of one that is not here: it can be imported, and raises UserError(text)
    when it is called. Programs import what they use only with some of their flags.
    """

    def refuse(cls: type, *args: object, **keywords: object) -> NoReturn:
        raise UserError(text)

    return type(name, (), {"__new__": refuse, "__doc__": text})


def unsupported_names(module: str, alternatives: Mapping[str, str]) -> Callable[[str], type]:
    """The __getattr__ of a module that lacks names of Lightning: `unsupported` classes.

    `alternatives` says for each name what to do instead.
    """

    def __getattr__(name: str) -> type:
        if name in alternatives:
            text = f"{module} does not support Lightning's {name}: {alternatives[name]}."
            return unsupported(name, text)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a notebook's stop button, after the processes that ran have ended.

    Its text is a sentence, which a notebook shows in place of a traceback.
    """

    def _render_traceback_(self) -> list[str]:
        return wrapped(str(self))


class StartedRanks(Protocol):
    """The other ranks of a run, if this process started them: see launch/relaunch.py."""

    def end(self) -> None:
        """End these ranks now."""

    def end_after(self, error: BaseException) -> None:
        """End these ranks because of `error`; if one failed first, report that one instead."""


class ErrorHook:
    """A `sys.excepthook`: end the ranks that this process started, then print the error.

    previous         the hook that was installed before; it prints all other errors
    one_sentence     whether a UserError is printed as its sentence, without a traceback
    started_ranks    the ranks to end before an error is printed; None if a launcher started
                     them
    """

    # This process's ErrorHook. sys.excepthook can be another hook: init_process_group installs
    # one, which calls this one.
    installed: "ErrorHook | None" = None

    def __init__(self, previous: Callable[..., object]):
        self.previous = previous
        self.one_sentence = False
        self.started_ranks: StartedRanks | None = None

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if self.started_ranks is not None:
            self.started_ranks.end_after(error)
        if self.one_sentence and isinstance(error, UserError):
            report(error)
            return
        if self.one_sentence and self.started_ranks is None and connection_lost(error):
            # Another rank printed why it ended: wait until the launcher ends this process.
            time.sleep(5)
        self.previous(kind, error, trace)


def error_hook() -> ErrorHook:
    """This process's ErrorHook; the first call installs it in `sys.excepthook`."""
    if ErrorHook.installed is None:
        ErrorHook.installed = ErrorHook(sys.excepthook)
        sys.excepthook = ErrorHook.installed
    return ErrorHook.installed


def report_user_errors() -> None:
    """From now on an uncaught UserError is printed as its sentence, without a traceback."""
    error_hook().one_sentence = True


def report(error: UserError) -> None:
    """End the ranks that this process started, then print the error's sentence to stderr.

    If another rank prints the same error, wait for the launcher to end this rank.
    """
    hook = ErrorHook.installed
    if hook is not None and hook.started_ranks is not None:
        hook.started_ranks.end()
    if error.already_reported:
        wait_for_launcher()
    else:
        print(f"error: {error}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning to stderr: something is not as it should be, and the program goes on."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def wait_for_launcher() -> None:
    """Give the launcher 10 s to end this rank.

    A launcher ends all ranks when the first one exits. The rank that prints the error must
    exit first.
    """
    time.sleep(10)


def connection_lost(error: BaseException | None) -> bool:
    """Whether the error, or a cause of it, says that a connection to another rank was lost."""
    while error is not None:
        if any(words in str(error) for words in CONNECTION_LOST):
            return True
        error = error.__cause__ or error.__context__
    return False


def needs_torchrun(error: str) -> bool:
    """Whether an error, "TYPE: TEXT", says that a rank's variables are missing."""
    return any(words in error for words in SET_BY_TORCHRUN)


def wrapped(text: str) -> list[str]:
    """The text in lines of at most 95 columns: a notebook would break lines within words."""
    return [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, 95, break_long_words=False, break_on_hyphens=False)
    ]


def pluralize(number: int, noun: str) -> str:
    """The number and its noun: 1 GPU, 2 GPUs, 2 batches."""
    ending = "es" if noun.endswith(("s", "x", "sh", "tch")) else "s"
    return f"{number} {noun}{ending if number != 1 else ''}"


def any_of(words: Iterable[str]) -> str:
    """The words as a choice: "fp32, fp16 or bf16"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(word: object, known: Iterable[object], cutoff: float = 0.5) -> str:
    """`did you mean 'this' or 'that'?`, with the known names that are most similar to `word`.

    Returns "" if none is similar.
    """
    near = difflib.get_close_matches(str(word), map(str, known), n=2, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
