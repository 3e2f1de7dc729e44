"""What the notebooks of the lessons call: `open_lesson` first, then its guesses and claims.

A prediction is a cell that is tagged "guess" and assigns names:

    guess_speedup = 1.8  # times as fast, at a batch of 64

The cell of the experiment begins with `need`, prints the result beside the guess, and claims
what the result shows:

    lesson.need(guess_speedup)
    …
    lesson.compare("speed-up at a batch of 64", guess_speedup, speedup, unit="×")
    lesson.claim("Two GPUs are faster", holds="no", because=…, when=speedup < 1)

In notebooks/ a guess has a value. In a learner's copy it is None until the learner writes
one (`multigpu notebooks copy`).
"""

from multigpu.lesson.claims import ClaimFails, claim
from multigpu.lesson.guesses import GuessNeeded, compare, need
from multigpu.lesson.kernel import setup
from multigpu.lesson.opening import Lesson, open_lesson

__all__ = [
    "ClaimFails",
    "GuessNeeded",
    "Lesson",
    "claim",
    "compare",
    "need",
    "open_lesson",
    "setup",
]
