"""What the notebooks of the lessons call: `setup` first, then `need` and `compare`.

A prediction is a cell that is tagged "guess" and assigns names:

    guess_speedup = 1.8  # times as fast, at a batch of 64

The cell of the experiment begins with `need`, and prints the result beside the guess:

    lesson.need(guess_speedup)
    …
    lesson.compare("speed-up at a batch of 64", guess_speedup, speedup, unit="×")

In notebooks/ a guess has a value. In a learner's copy it is None until the learner writes
one (`multigpu notebooks copy`).
"""

from multigpu.lesson.guesses import GuessNeeded, compare, need
from multigpu.lesson.kernel import setup

__all__ = ["GuessNeeded", "compare", "need", "setup"]
