"""The first cell of a notebook: `lesson = multigpu.open_lesson("02-data-parallel")`."""

import os
from pathlib import Path

from multigpu.course import find_root
from multigpu.lesson import claims, guesses, kernel


class Lesson:
    """An open lesson: its guesses and its claims."""

    need = staticmethod(guesses.need)
    compare = staticmethod(guesses.compare)
    claim = staticmethod(claims.claim)

    def __init__(self, folder: Path):
        self.folder = folder

    def __repr__(self) -> str:
        return f"<lesson {self.folder.name}>"


def open_lesson(slug: str, *, ranks: bool = False) -> Lesson:
    """Open the lesson lessons/SLUG in this kernel, in the notebook's first cell.

    The working directory becomes the course's folder, wherever the notebook lies, so that
    commands are those of the lesson's page; `from experiments import …` imports the lesson's
    own functions. A `!command` that fails raises an error, and errors of a learner are one
    sentence. With `ranks`, for a notebook that starts ranks with `launch.call`, a server is
    started that starts them faster. A second call changes nothing.

    Raises UserError if there is no such lesson.
    """
    root = find_root()
    kernel.setup(slug, ranks=ranks)
    os.chdir(root)
    return Lesson(root / "lessons" / slug)
