"""What the grader's kernel runs before and after the checks of a submission."""

import json
import resource
from pathlib import Path
from typing import Any

from multigpu.exercise.exercise import Grading, grade_with
from multigpu.exercise.sources import Sources
from multigpu.virtual import control, face

# What the checks may use beside what the imports use. An answer decides on the size of what it
# returns, and a check that needs more is wrong: it ends in MemoryError.
MEMORY = 4 << 30

_grading: Grading | None = None


def begin(file: str) -> None:
    """Forget the last submission, and take the answers of the next one.

    file   JSON: the fields of Sources, and `secret` and `sandbox` of Grading
    """
    from IPython import get_ipython

    global _grading
    _limit_memory()
    shell = get_ipython()
    if shell is not None:
        shell.reset(new_session=True)
    # The next exercise may start another number of virtual GPUs.
    face.take_off()
    control.stop()
    data: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    secret, sandbox = data.pop("secret"), data.pop("sandbox")
    _grading = Grading(Sources(**data), secret, sandbox)
    grade_with(_grading)


def _limit_memory() -> None:
    """Limit this process's memory, once. Each process that it starts has the same limit."""
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        return
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return  # macOS has no /proc: there the checks have no limit of memory
    used = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))


def end(file: str) -> None:
    """Write what the checks record, as JSON: the list `record` of Grading."""
    Path(file).write_text(json.dumps(_grading.record), encoding="utf-8")
