"""Predictions: an experiment needs the learner's guess, and prints it beside the result."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import SupportsFloat

from multigpu.errors import UserError, wrapped


class GuessNeeded(UserError):
    """A guess has no value, or one that cannot be compared. A notebook shows the text only."""

    def _render_traceback_(self) -> list[str]:
        return wrapped(str(self))


def need(*guesses: object, choices: Sequence[str] = ()) -> None:
    """Check that each guess is a finite number, or one of `choices` if there are any.

    As the first line of a cell it locks the cell until the guesses above it are written.
    Raises GuessNeeded for the first guess that is missing or of another kind.
    """
    for place, guess in enumerate(guesses, 1):
        which = f" ({place} of {len(guesses)})" if len(guesses) > 1 else ""
        _check(guess, choices, which)


def compare(
    what: str,
    guess: object,
    result: SupportsFloat | str,
    *,
    unit: str = "",
    digits: int = 2,
    choices: Sequence[str] = (),
) -> None:
    """Print one line: what was guessed, the guess, the result, and how far apart they are.

    digits   the decimals to which a number is rounded: choose those that are the same in each
             run, because nbval compares the line
    choices  the texts that a guess can be; upper and lower case do not matter

    If both numbers are positive, the line gives their ratio, computed from the rounded result;
    otherwise, and for the unit "%", it gives their difference. A guess of 0.75 where percent
    is meant gets a hint. Counts are whole numbers without a unit: if the larger one is less
    than twice the smaller, the line gives their difference. Raises GuessNeeded as `need` does,
    and ValueError if the result is not one of `choices`.
    """
    if isinstance(result, str) or choices:
        choices = choices or (str(result),)
        if result not in choices:
            raise ValueError(f"the result {result!r} is not one of the choices {choices}")
        _check(guess, choices if len(choices) > 1 else (), text=True)
        same = str(guess).strip().casefold() == str(result).casefold()
        verdict = "your guess is right" if same else "your guess is wrong"
        print(f"{what}: guess {guess}, result {result}: {verdict}")
        return
    _check(guess)
    guessed = float(guess)
    rounded = round(float(result), digits)
    space = " " if unit[:1].isalpha() else ""
    numbers = f"guess {guessed:,.12g}{space}{unit}, result {rounded:,.{digits}f}{space}{unit}"
    counts = not unit and not digits and guessed.is_integer() and float(result).is_integer()
    print(f"{what}: {numbers}{_distance(guessed, rounded, unit, digits, counts)}")


def _check(
    guess: object, choices: Sequence[str] = (), which: str = "", text: bool = False
) -> None:
    """Raise GuessNeeded unless the guess is a text (one of `choices`) or a finite number."""
    if choices:
        wanted = " or ".join(f'"{choice}"' for choice in choices)
    else:
        wanted = "a text in quotes" if text else "a number, such as 2 or 1.5"
    then = ", run that cell, then this one."
    if guess is None:
        raise GuessNeeded(
            f"No guess yet{which}: in the cell with the guesses, write {wanted} in place "
            f"of None{then}"
        )
    if choices:
        known = [choice.casefold() for choice in choices]
        valid = isinstance(guess, str) and guess.strip().casefold() in known
        problem = "is not one of the answers"
    elif text:
        valid = isinstance(guess, str) and bool(guess.strip())
        problem = "is not a text"
    else:
        number = isinstance(guess, Real) and not isinstance(guess, bool)
        valid = number and math.isfinite(guess)
        problem = "is not finite" if number else "is not a number"
    if not valid:
        raise GuessNeeded(
            f"The guess {guess!r}{which} {problem}: in the cell with the guesses, "
            f"write {wanted}{then}"
        )


def _distance(guess: float, result: float, unit: str, digits: int, counts: bool) -> str:
    """How far a guess is from a result, as the end of a sentence."""
    if not math.isfinite(result):
        return ""
    if round(guess, digits) == result:
        return ": your guess is right"
    if guess <= 0 or result <= 0 or unit == "%":
        difference = f"{abs(guess - result):,.{digits}f}"
        apart = f": {difference} {'points' if unit == '%' else unit} apart".replace("  ", " ")
        # If the result is small, such as an error of 0.4%, a guess below 1 is in percent.
        if unit == "%" and 0 < guess <= 1 and result >= 10:
            apart += "; write the guess in percent: 75, not 0.75"
        return apart
    factor = max(guess, result) / min(guess, result)
    if counts and factor < 2:
        return f": {abs(guess - result):,.0f} apart"
    if factor < 1.05:
        return ": less than 5% apart"
    times = f"{factor:,.1f}" if factor < 9.95 else f"{factor:,.0f}"
    if guess > result:
        return f": the guess is {times} times the result"
    return f": the result is {times} times the guess"
