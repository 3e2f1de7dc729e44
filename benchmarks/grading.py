"""Grading beside nbgrader, on the same answers: `python benchmarks/grading.py [NBGRADER [N]]`.

NBGRADER is the command of an environment that has nbgrader and torch, for example made by
`python -m venv other && other/bin/pip install nbgrader torch`. N submissions (default 100)
answer two questions about tensors; each third one is wrong. Both graders run them from the
command to its end, in turn, ROUNDS times.

1. Submissions per second, ours ÷ nbgrader's. Goal: at least 10.
2. Ours alone, in submissions a minute on all cores; then beside a hog, which begins first:
   endless loops in 16 processes, in both questions. Goals: 40 a minute on two cores, and
   beside the hog at least half of it. Without NBGRADER, this alone is measured.
3. 100 submissions of lesson 05. Goal: less than 4 minutes.
4. A student's check in a warm notebook. Goal: less than 3 s.

It writes benchmarks/grading.json.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from multigpu.files import write_json
from multigpu.grading import grade, release, solution
from multigpu.grading.pool import Pool
from multigpu.grading.solution import dumps
from multigpu.grading.submissions import Submission
from multigpu.launch import sandbox

HERE = Path(__file__).parent
ROUNDS = 2
LESSON = "05-ddp-cluster"
GIVEN = "import torch"
ANSWERS = {
    "mean": "def mean(tensors):\n    return torch.stack(tensors).mean(0)",
    "shard": "def shard(n, ranks, rank):\n    return list(range(rank, n, ranks))",
}
HOG = """import os
for _ in range(4):
    os.fork()
while True:
    pass
"""
WRONG = {"mean": "def mean(tensors):\n    return torch.stack(tensors).sum(0)"}
# nbgrader's checks are asserts in the student's process; ours are the same statements.
ASSERTS = {
    "mean": "torch.manual_seed(1)\nparts = [torch.rand(5) for _ in range(4)]\n"
    "assert torch.allclose(mean(parts), sum(parts) / 4)",
    "shard": "assert sorted(sum((shard(10, 3, r) for r in range(3)), [])) == list(range(10))",
}
CHECKS = {
    "mean": 'with exercise.check("mean", "four tensors", points=1) as student:\n'
    "    parts = [torch.rand(5, generator=student.generator) for _ in range(4)]\n"
    '    student.close_to(student.call("mean", parts), sum(parts) / 4, "it is the mean")',
    "shard": 'with exercise.check("shard", "10 rows", points=1) as student:\n'
    '    rows = [student.call("shard", 10, 3, rank) for rank in range(3)]\n'
    '    student.equal(sorted(sum(rows, [])), list(range(10)), "each row has one rank")',
}


def answers(number: int) -> dict[str, str]:
    """What submission `number` answers; no two are the same text."""
    chosen = ANSWERS | (WRONG if number % 3 == 0 else {})
    return {name: f"{text}\n# student {number}" for name, text in chosen.items()}


# ---- nbgrader -------------------------------------------------------------------------------


def nbgrader_cell(source: str, name: str, **more: object) -> nbformat.NotebookNode:
    fields = {"schema_version": 3, "grade_id": name, "grade": False, "locked": False}
    metadata = {"nbgrader": fields | {"solution": False, "task": False} | more}
    return nbformat.v4.new_code_cell(source, metadata=metadata)


def nbgrader_notebook(chosen: dict[str, str]) -> nbformat.NotebookNode:
    cells = [nbgrader_cell(GIVEN, "given", locked=True)]
    for name, text in chosen.items():
        cells.append(nbgrader_cell(text, name, solution=True))
        cells.append(
            nbgrader_cell(ASSERTS[name], f"{name}_check", grade=True, locked=True, points=1)
        )
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    return notebook


def prepare_nbgrader(folder: Path, count: int, command: str) -> None:
    marked = {
        name: f"### BEGIN SOLUTION\n{text}\n### END SOLUTION" for name, text in ANSWERS.items()
    }
    source = folder / "source" / "one"
    source.mkdir(parents=True)
    nbformat.write(nbgrader_notebook(marked), source / "one.ipynb")
    for number in range(count):
        target = folder / "submitted" / f"student{number}" / "one"
        target.mkdir(parents=True)
        nbformat.write(nbgrader_notebook(answers(number)), target / "one.ipynb")
    run(folder, command, "generate_assignment", "one")


def nbgrader(folder: Path, command: str) -> float:
    shutil.rmtree(folder / "autograded", ignore_errors=True)
    return run(folder, command, "autograde", "one", "--force")


# ---- ours -----------------------------------------------------------------------------------


def code(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source)


def prepare_ours(folder: Path, count: int) -> None:
    setup = (
        f'# setup\nfrom multigpu.exercise import Exercise\n\nexercise = Exercise("{LESSON}")'
    )
    cells = [code(setup), code(f"# given\n{GIVEN}")]
    for name, text in ANSWERS.items():
        cells.append(code(f"# answer: {name}\n### BEGIN SOLUTION\n{text}\n### END SOLUTION"))
        cells.append(code(CHECKS[name]))
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3").execute()
    (folder / "solutions").mkdir()
    nbformat.write(notebook, folder / "solutions" / f"{LESSON}.ipynb")
    submit(solution.find("05", folder / "solutions"), folder / "handed-in", count, answers)


def submit(found: solution.Solution, folder: Path, count: int, chosen) -> None:
    folder.mkdir()
    for number in range(count):
        made = release.student_notebook(found)
        for cell in made.cells:
            name = cell.metadata.get("grade_id")
            cell.source = chosen(number).get(name, cell.source)
        (folder / f"student{number}.ipynb").write_text(dumps(made))


def ours(folder: Path, *options: str) -> float:
    shutil.rmtree(folder / "graded", ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "multigpu.cli",
        "grade",
        "05",
        "handed-in",
        "-o",
        "graded",
    ]
    return run(folder, *command, *options)


def a_minute(folder: Path, hogs: int) -> float:
    """Honest submissions a minute on all cores, beside so many hogs, which begin first."""
    lesson = solution.find("05", folder / "solutions")
    submit(lesson, folder / f"hogs{hogs}", hogs, lambda _: dict.fromkeys(ANSWERS, HOG))
    honest = sorted((folder / "handed-in").iterdir())
    paths = [*(folder / f"hogs{hogs}").iterdir(), *honest]
    given = [Submission(str(path), path.name, path.read_bytes()) for path in paths]
    where = (folder / f"out{hogs}", sandbox.probe().program)
    began = time.perf_counter()
    ended: list[float] = []

    def progress(done: int, of: int) -> None:
        # All honest ones, or the hog and all but one.
        if done >= len(honest) and not ended:
            ended.append(time.perf_counter() - began)

    with Pool(os.cpu_count(), lesson.seconds) as pool:
        grade.grade(lesson, given, *where, pool, progress)
    return 60 * len(honest) / ended[0]


def warm_check(root: Path) -> list[float]:
    """Seconds of each visible check of lesson 05 in a notebook that has run it before."""
    notebook = nbformat.read(root / "lessons" / LESSON / "solution.ipynb", as_version=4)
    client = NotebookClient(notebook, kernel_name="python3")
    taken = []
    with client.setup_kernel(cwd=str(root)):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        for index, cell in enumerate(notebook.cells):
            if "exercise.check" in cell.source and "hidden=True" not in cell.source:
                began = time.perf_counter()
                client.execute_cell(cell, index)
                taken.append(time.perf_counter() - began)
    return taken


def run(folder: Path, *command: str) -> float:
    """Seconds of a command."""
    # nbgrader's kernel must be that of its own environment.
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ["PATH"]])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PATH": path}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    taken = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return taken


def row(name: str, values: list[float], goal: float) -> dict[str, object]:
    middle = statistics.median(values)
    ends = {"min": min(values), "max": max(values)}
    return {"name": name, "median": middle, **ends, "goal": goal, "n": len(values)}


def beside_a_hog(folder: Path) -> list[dict[str, object]]:
    load = os.getloadavg()[0]
    alone, beside = a_minute(folder, 0), a_minute(folder, 1)
    print(f"{alone:.0f} a minute, beside a hog {beside:.0f}; load average before {load:.1f}")
    return [
        row("ours, submissions a minute", [alone], 40.0),
        row("ours beside a hog / alone", [beside / alone], 0.5),
        row("load average of the machine before these two", [load], float("nan")),
    ]


def ours_alone() -> None:
    """Measure what needs no nbgrader; the other rows of grading.json stay."""
    with tempfile.TemporaryDirectory() as name:
        prepare_ours(Path(name), 150)
        rows = beside_a_hog(Path(name))
    names = [each["name"] for each in rows]
    before = json.loads((HERE / "grading.json").read_text())["rows"]
    write([*(each for each in before if each["name"] not in names), *rows])


def write(rows: list[dict[str, object]]) -> None:
    for each in rows:
        if each.get("goal") != each.get("goal"):
            del each["goal"]
    print(write_json(HERE / "grading.json", {"rows": rows}))


def main() -> None:
    if len(sys.argv) == 1:
        return ours_alone()
    command = str(Path(sys.argv[1]).absolute())
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    root = HERE.parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_nbgrader(folder, count, command)
        prepare_ours(folder, count)
        ratios, theirs, own = [], [], []
        for _ in range(ROUNDS):
            theirs.append(nbgrader(folder, command))
            own.append(ours(folder, "--solutions", "solutions"))
            ratios.append(theirs[-1] / own[-1])
            print(f"nbgrader {theirs[-1]:.1f} s, ours {own[-1]:.1f} s: {ratios[-1]:.1f}x")
        of_hog = beside_a_hog(folder)
        lesson = solution.find("05")
        right = {question.name: question.answer for question in lesson.questions}
        shutil.rmtree(folder / "handed-in")

        def all_different(number: int) -> dict[str, str]:
            return {key: f"{text}\n# student {number}" for key, text in right.items()}

        submit(lesson, folder / "handed-in", 100, all_different)
        hundred = ours(folder)
        print(f"100 submissions of lesson 05: {hundred:.0f} s")
        checks = warm_check(root)
        print(f"checks in a warm notebook: at most {max(checks):.2f} s")
    rows = [
        row(f"throughput, ours / nbgrader, {count} submissions", ratios, 10.0),
        row(f"nbgrader, {count} submissions, seconds", theirs, float("nan")),
        row(f"ours, {count} submissions, seconds", own, float("nan")),
        *of_hog,
        row("100 submissions of lesson 05, seconds", [hundred], 240.0),
        row("slowest visible check of lesson 05, warm, seconds", [max(checks)], 3.0),
    ]
    write(rows)


if __name__ == "__main__":
    main()
