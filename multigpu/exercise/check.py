"""A check of an answer: it calls the student's functions, and prints verdicts."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from multigpu.exercise.hub import Call, Hub
from multigpu.exercise.session import Session, StudentError
from multigpu.exercise.sources import GIVEN
from multigpu.exercise.verdicts import difference, shown

MAX_MESSAGE = 400
MAX_VERDICT = 2000  # characters: a check may quote what the answer returned
UNANSWERED = "NotImplementedError"  # what the released answer raises


@dataclass
class Ranks:
    """What the ranks of a student's function returned and called.

    events   each rank's collectives and gates, in their order: (kind, bytes), ("gate", name)
    factors  of each gate
    """

    values: list[Any]
    calls: list[list[Call]]
    events: list[list[tuple[str, Any]]]
    factors: dict[str, float]

    def sent(self, rank: int) -> int:
        """Bytes that a rank gave to collectives and sends."""
        return sum(call.bytes for call in self.calls[rank])


class Check:
    """The `student` of `with exercise.check(…) as student`.

    random      numbers for the check's inputs: the same for all students; hidden checks draw
                others than visible ones
    generator   the same for torch
    lines       the verdicts; `right` says whether all of them are right
    seconds     that the answer's plan takes, simulated; None if no check measures it
    starved     whether a process of the answer's had no core for much of the time
    """

    def __init__(
        self, cells: Sequence[tuple[str, str]], seed: str, new_session: Callable[[], Session]
    ):
        """Prepare a check. `cells` are (name, text) of what each of its processes runs."""
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(63))
        self.lines: list[str] = []
        self.right = True
        self.seconds: float | None = None
        self.printed = ""
        self._cells = cells
        self._new_session = new_session
        self.starved = False
        self._session: Session | None = None

    # ---- the student's code -----------------------------------------------------------------

    def call(self, function: str, *arguments: Any, **keywords: Any) -> Any:
        """What the student's function returns for plain data. Raises StudentError."""
        return self._started().call(function, arguments, keywords)

    def value(self, name: str) -> Any:
        """A variable of the answer, plain data. Raises StudentError, also for None."""
        value = self._started().value(name)
        if value is None:
            raise StudentError(UNANSWERED, "")
        return value

    def ranks(self, function: str, arguments: Sequence[Sequence[Any]]) -> Ranks:
        """Call the function on one rank for each item of `arguments`, at the same time.

        torch.distributed is initialized in each rank's process; the checks are its network.
        Raises StudentError for the first rank that fails, and for a collective that would
        hang or that ranks call with different arguments.
        """
        size = len(arguments)
        hub = Hub(size, self.random.getrandbits(63))
        sessions = [self._new_session() for _ in range(size)]
        values: list[Any] = [None] * size
        errors: list[Exception | None] = [None] * size

        def run(rank: int) -> None:
            why = "has returned"
            try:
                self._load(sessions[rank])
                sessions[rank].join(hub, rank)
                values[rank] = sessions[rank].call(function, arguments[rank], {})
            except Exception as error:  # also one of the network, from an enemy's request
                errors[rank] = error
                why = "has failed"
            hub.end(rank, why)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            # Release all before the first close, which waits for its process to end.
            for session in sessions:
                session.release()
            for session in sessions:
                session.close()
            self._keep_output(sessions)
        failures = [error for error in errors if error is not None]
        # Not that of a rank which waited for the failed one.
        causes = [error for error in failures if getattr(error, "kind", "") != "Collective"]
        for error in causes or failures:
            raise error
        return Ranks(values, hub.calls, hub.events, hub.factors)

    def _started(self) -> Session:
        if self._session is None:
            self._session = self._new_session()
            self._load(self._session)
        return self._session

    def _load(self, session: Session) -> None:
        for name, source in self._cells:
            session.run(name, source, given=name.startswith(GIVEN))

    def _keep_output(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self.starved = self.starved or session.starved
            self.printed += session.printed.decode(errors="replace")

    def close(self) -> None:
        """End the student's processes."""
        if self._session is not None:
            self._session.close()
            self._keep_output([self._session])

    # ---- verdicts ---------------------------------------------------------------------------

    def expect(self, condition: bool, statement: str, otherwise: str = "") -> bool:
        """A verdict: `statement` is right or wrong; `otherwise` says why it is wrong."""
        right = bool(condition)
        why = f": {otherwise}" if otherwise and not right else ""
        self.right = self.right and right
        # A carriage return in a student's text would make nbval forget what stands before it.
        verdict = f"{'right' if right else 'wrong'}: {statement}{why}"
        self.lines.append(_one_line(verdict[:MAX_VERDICT]))
        return right

    def equal(self, got: Any, expected: Any, statement: str) -> bool:
        """A verdict: equal plain data; see verdicts.difference."""
        text = difference(got, expected)
        return self.expect(not text, statement, text)

    def close_to(
        self, got: Any, expected: Any, statement: str, rtol: float = 1e-5, atol: float = 1e-6
    ) -> bool:
        """A verdict: equal within atol + rtol × |expected| (verdicts.difference)."""
        text = difference(got, expected, rtol, atol)
        return self.expect(not text, statement, text)

    def guess(
        self,
        name: str,
        result: float,
        statement: str,
        hint: str,
        *,
        within: float,
        unit: str = "",
    ) -> bool:
        """A verdict about a prediction; it never prints the result.

        name     the variable that holds the prediction
        result   what the experiment gives
        within   how far the prediction may be from the result, at most
        hint     a question or a step that leads to the result
        unit     of the number, such as MiB; for "percent", 0.75 gets a hint
        """
        guess = self.value(name)
        if isinstance(guess, torch.Tensor) and guess.ndim == 0:
            guess = guess.item()
        if isinstance(guess, bool) or not isinstance(guess, Real):
            a_number = f"a number, in {unit}" if unit else "a number"
            return self.expect(
                False, statement, f"{name} must be {a_number}; it is {shown(guess)}"
            )
        if unit == "percent" and 0 < guess <= 1:
            hint = f"write {name} in percent: 75, not 0.75"
        right = abs(guess - result) <= within
        return self.expect(right, statement if right else f"{name} is another number", hint)

    def takes(self, seconds: float, limit: float, subject: str) -> bool:
        """A verdict: `subject` takes at most `limit` s; the check simulated `seconds`.

        The seconds get into the class's table of times, also if they are above the limit.
        """
        self.seconds = seconds
        why = f"it takes {seconds:.4f} s"
        return self.expect(seconds <= limit, f"{subject} takes at most {limit:g} s", why)

    def failed(self, error: Exception) -> None:
        """A verdict about an error that ended the check."""
        if isinstance(error, StudentError) and error.kind == UNANSWERED:
            self.expect(False, "no answer yet: write it in place of `# YOUR CODE HERE`")
        elif isinstance(error, StudentError):
            answer_lines = [line for line in error.lines if not line.startswith(GIVEN)]
            line = next(reversed(answer_lines or error.lines), "")
            where = f" at {line}" if line else ""
            self.expect(False, f"the code stopped{where[:MAX_MESSAGE]}", _cut(error))
        else:
            text = f"{type(error).__name__}: {_cut(error)}"
            self.expect(False, "the code returned something unexpected", text)


def _cut(error: Exception) -> str:
    return str(error)[:MAX_MESSAGE]


def _one_line(text: str) -> str:
    """The text without line breaks and other control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
