"""What an exercise's notebook calls: its checks, for the student and for the grader."""

import hashlib
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from multigpu.errors import Interrupted, UserError
from multigpu.exercise.budget import QUESTION_CHECKS, SECONDS, SUBMISSION_CHECKS
from multigpu.exercise.check import Check
from multigpu.exercise.session import CannotRun, Session
from multigpu.exercise.sources import Sources, from_history
from multigpu.exercise.worker import Worker

PRINTED = "Your code printed:"
OWN_SECONDS = 10.0  # by which a check may take longer than the answer, for its own code


@dataclass
class Grading:
    """What the grader gives to the checks; a student's notebook has none.

    secret    what the seeds of hidden checks are made of
    sandbox   the path of bubblewrap; None to run without
    record    a dict of question, title, right, starved, printed, seconds for each check that
              ended
    """

    sources: Sources
    secret: str
    sandbox: str | None
    record: list[dict[str, Any]] = field(default_factory=list)


class TooLong(Exception):
    """A check did not end. No OSError, which code on the way would take for another fault."""


_grading: Grading | None = None
_workers: dict[tuple[str | None, tuple[str, ...]], Worker] = {}


def grade_with(grading: Grading | None) -> None:
    """Give the next Exercise of this process its answers, in place of the notebook's own."""
    global _grading
    _grading = grading


class Exercise:
    """The exercise of a lesson: `exercise = Exercise("01-one-gpu")` in its setup cell."""

    def __init__(self, lesson: str, *, imports: Sequence[str] = (), seconds: float = SECONDS):
        """Start the process in which the checks run the answers.

        imports   modules that are imported there in advance, because they are slow
        seconds   that a check may take
        """
        self.lesson = lesson
        self.seconds = seconds
        self._verdicts: dict[str, dict[str, tuple[bool, float]]] = defaultdict(dict)
        self._used: dict[str, float] = defaultdict(float)
        self._grading = _grading
        self._imports = tuple(imports)
        self._worker()

    def _worker(self) -> Worker:
        """The process, started again if it has ended."""
        program = self._grading.sandbox if self._grading else None
        key = (program, self._imports)
        worker = _workers.get(key)
        if worker is None or worker.ended:
            worker = _workers[key] = Worker(program, imports=self._imports)
        return worker

    @contextmanager
    def check(
        self, question: str, title: str, *, points: float, hidden: bool = False
    ) -> Iterator[Check]:
        """Check an answer: call its functions, and print a verdict for each statement.

        question   the name in the answer's first line: # answer: NAME
        title      what is checked, a few words
        points     what it gives if all verdicts are right
        hidden     the student does not get this check

        An error in the student's code is a verdict. Raises CannotRun if the machine cannot run
        the student's process.
        """
        secret = self._grading.secret if self._grading and hidden else "visible"
        seed = hashlib.sha256("\n".join([secret, question, title]).encode()).hexdigest()
        worker = self._worker()
        worker.wait_until_ready()
        begin = time.monotonic()

        def new_session() -> Session:
            left = self._seconds_left(question) - (time.monotonic() - begin)
            try:
                return worker.session(max(0.1, left))
            except OSError as error:
                raise CannotRun(f"no process for the answer: {error}") from None

        check = Check(self._sources().of(question), seed, new_session)
        try:
            with _deadline(self.seconds + OWN_SECONDS):
                yield check
        except CannotRun:
            raise
        except KeyboardInterrupt:
            raise Interrupted("Interrupted: this check gives no verdict.") from None
        except Exception as error:
            # What a student returns can make the check's own code raise any exception: a plan
            # that a library function refuses raises UserError, for example.
            check.failed(error)
        finally:
            check.close()
            self._used[question] += time.monotonic() - begin
        if not check.lines:
            check.expect(False, "the check made no statement")
        self._verdicts[question][title] = (check.right, points)
        print("\n".join(check.lines))
        if self._grading:
            # Feedback shows what is printed, and an answer could print the hidden inputs.
            printed = "" if hidden else check.printed
            record = {"question": question, "title": title, "printed": printed}
            record |= {"right": check.right, "starved": check.starved}
            self._grading.record.append(record | {"seconds": check.seconds})
        elif check.printed:
            print(f"{PRINTED}\n{check.printed}")

    def _seconds_left(self, question: str) -> float:
        """What a check may take; a student can run it as often as wanted."""
        if self._grading is None:
            return self.seconds
        all_questions = SUBMISSION_CHECKS * self.seconds - sum(self._used.values())
        this_question = QUESTION_CHECKS * self.seconds - self._used[question]
        return min(self.seconds, this_question, all_questions)

    def _sources(self) -> Sources:
        if self._grading:
            return self._grading.sources
        from IPython import get_ipython

        shell = get_ipython()
        if shell is None:
            raise UserError("the checks run in a notebook, or by `multigpu exercise check`.")
        return from_history(shell.user_ns["In"])

    def summary(self) -> None:
        """Print the points of the checks that have run, and that hidden ones remain."""
        together: list[tuple[bool, float]] = []
        for question, verdicts in self._verdicts.items():
            print(f"{question}: {_points(verdicts.values())} points")
            together += verdicts.values()
        print(f"together: {_points(together)} points of the checks that have run")
        print("The rest of the points comes from hidden checks, when your notebook is graded.")
        print("They try other values.")


def _points(verdicts: Iterable[tuple[bool, float]]) -> str:
    earned = sum(points for right, points in verdicts if right)
    return f"{earned:g} of {sum(points for _, points in verdicts):g}"


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise TooLong after some seconds.

    The checks execute what a student returns, such as a schedule, and one of 10 ** 12 steps
    would not end.
    """

    def late(*_: object) -> None:
        raise TooLong(f"a check of what the code returned did not end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
