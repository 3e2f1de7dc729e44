"""What the grader's kernel runs before and after the checks of a submission."""

import json
from pathlib import Path
from typing import Any

from multigpu import vgpu
from multigpu.exercise.exercise import Grading, grade_with
from multigpu.exercise.sources import Sources
from multigpu.virtual import face

_grading: Grading | None = None


def begin(file: str) -> None:
    """Forget the last submission, and take the answers of the next one.

    file   JSON: the fields of Sources, and `secret` and `sandbox` of Grading
    """
    from IPython import get_ipython

    global _grading
    shell = get_ipython()
    if shell is not None:
        shell.reset(new_session=True)
    # The next exercise may start another number of virtual GPUs.
    face.take_off()
    vgpu.stop()
    data: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    secret, sandbox = data.pop("secret"), data.pop("sandbox")
    _grading = Grading(Sources(**data), secret, sandbox)
    grade_with(_grading)


def end(file: str) -> None:
    """Write what the checks record, as JSON: a list of question, title, right, printed."""
    Path(file).write_text(json.dumps(_grading.record), encoding="utf-8")
