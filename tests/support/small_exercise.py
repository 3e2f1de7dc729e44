"""A small exercise, whose stored outputs are written here in place of a run."""

from pathlib import Path

import nbformat

from multigpu.grading import solution as solutions
from multigpu.grading.solution import Solution

LESSON = "05-ddp-cluster"
CELLS = [
    "# Exercises",
    "# setup\nimport torch\nfrom multigpu.exercise import Exercise\n\n"
    f'exercise = Exercise("{LESSON}", seconds=5)',
    "# given\nimport torch\nimport torch.distributed as dist",
    "## 1. The mean over ranks (4 points)",
    "# answer: mean\ndef mean(tensor):\n    ### BEGIN SOLUTION\n    dist.all_reduce(tensor)\n"
    "    return tensor / dist.get_world_size()\n    ### END SOLUTION",
    'with exercise.check("mean", "two ranks", points=1) as student:\n'
    '    run = student.ranks("mean", [[torch.ones(2)], [3 * torch.ones(2)]])\n'
    '    student.close_to(run.values, [[2.0, 2.0]] * 2, "each rank has the mean")',
    'with exercise.check("mean", "other sizes", points=3, hidden=True) as student:\n'
    "    tensors = [torch.rand(3, generator=student.generator) for _ in range(3)]\n"
    '    run = student.ranks("mean", [[tensor] for tensor in tensors])\n'
    "    wanted = torch.stack(tensors).mean(0)\n"
    '    student.close_to(run.values, [wanted] * 3, "each rank has the mean")',
    "## 2. Twice the mean (3 points)",
    "# answer: twice (needs mean)\ndef twice(tensor):\n    ### BEGIN SOLUTION\n"
    "    return 2 * mean(tensor)\n    ### END SOLUTION",
    'with exercise.check("twice", "two ranks", points=3) as student:\n'
    '    run = student.ranks("twice", [[torch.ones(2)], [3 * torch.ones(2)]])\n'
    '    student.close_to(run.values, [[4.0, 4.0]] * 2, "each rank has twice the mean")',
    "## 3. Bytes (2 points)",
    "# answer: guess_bytes\nguess_bytes = None\n### BEGIN SOLUTION\nguess_bytes = 4000\n"
    "### END SOLUTION",
    'with exercise.check("guess_bytes", "1,000 floats", points=2) as student:\n'
    '    student.equal(student.value("guess_bytes"), 4 * 1000, "4 bytes each")',
]
PRINTED = {
    "two ranks": "right: each rank has the mean\n",
    "other sizes": "right: each rank has the mean\n",
    '"twice"': "right: each rank has twice the mean\n",
    "1,000 floats": "right: 4 bytes each\n",
}
RIGHT = {
    "mean": "def mean(tensor):\n    dist.all_reduce(tensor)\n"
    "    return tensor / dist.get_world_size()",
    "twice": "def twice(tensor):\n    return mean(tensor) * 2",
    "guess_bytes": "guess_bytes = 4000",
}


def cells() -> list[nbformat.NotebookNode]:
    """The cells with outputs, as if they had run."""
    made = []
    for source in CELLS:
        if source.startswith(("# Ex", "## ")):
            made.append(nbformat.v4.new_markdown_cell(source))
            continue
        cell = nbformat.v4.new_code_cell(source, execution_count=len(made))
        printed = [text for words, text in PRINTED.items() if words in source]
        if "exercise.check" in source:
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed[-1])]
        made.append(cell)
    return made


def write(folder: Path, changed: list[nbformat.NotebookNode] | None = None) -> Path:
    """Write the solution notebook. Returns its path."""
    path = folder / f"{LESSON}.ipynb"
    notebook = nbformat.v4.new_notebook(cells=changed or cells())
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    return path


def solution(folder: Path) -> Solution:
    """The exercise's solution."""
    return solutions.read(write(folder), LESSON)
