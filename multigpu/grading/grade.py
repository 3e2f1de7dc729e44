"""Grade submissions: `multigpu grade LESSON SUBMISSIONS -o DIR`."""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.grading import marking, temporary
from multigpu.grading.marking import Outcome
from multigpu.grading.pool import Pool
from multigpu.grading.results import QuestionResult, Result
from multigpu.grading.solution import Solution, dumps, read
from multigpu.grading.submissions import Submission
from multigpu.grading.transplant import Answers, take

CACHE = "outcomes"
CHECKED = "checked.txt"  # the digest of the solution that passes its checks on this machine
SECRET = "secret.txt"
VERSION = 4  # of what is stored in CACHE


def grade(
    solution: Solution,
    submissions: Sequence[Submission],
    folder: Path,
    sandbox: str | None,
    pool: Pool,
    progress: Callable[[int, int], None],
) -> list[Result]:
    """The results, one per submission, in the order of the submissions.

    folder     where results and outcomes are kept
    sandbox    the path of bubblewrap; None to run without
    progress   is called with how many submissions are graded, and of how many

    An outcome is stored as soon as it is known, so that a run that was interrupted goes on
    where it stopped. Raises UserError if the solution itself does not pass its checks here,
    and if all notebooks are of another lesson.
    """
    answers = [take(submission.data, solution) for submission in submissions]
    _check_lesson(solution, answers)
    secret = read_secret(folder)
    texts = [marking.to_run(solution, answer) for answer in answers]
    ids = [_digest(solution, text, secret) for text in texts]
    outcomes = {id: outcome for id in ids if (outcome := _stored(folder, id))}
    tasks = {id: text for id, text in zip(ids, texts, strict=True) if id not in outcomes}
    done = sum(id in outcomes for id in ids)
    progress(done, len(ids))
    if tasks:
        with temporary.folder() as work:
            runner = Runner(solution, pool, work, secret, sandbox)
            checked = folder / CHECKED
            right = _digest(solution, solution.answers(), secret)
            if not checked.exists() or checked.read_text() != right:
                runner.check_solution(times=min(pool.jobs, len(tasks)))
                with atomic(checked) as file:
                    file.write_text(right)
            for id, outcome in runner.run(tasks):
                outcomes[id] = outcome
                if not outcome.blocked:
                    _store(folder, id, outcome)
                done += ids.count(id)
                progress(done, len(ids))
    return [
        result(solution, submission, answer, outcomes[id])
        for submission, answer, id in zip(submissions, answers, ids, strict=True)
    ]


def _check_lesson(solution: Solution, answers: Sequence[Answers]) -> None:
    """Raise UserError if all notebooks that can be read are of other lessons."""
    readable = [answer for answer in answers if answer.lesson or not answer.problem]
    others = sorted({answer.lesson for answer in readable})
    if others and "" not in others:
        raise UserError(
            f"nothing was graded: all notebooks are of lesson {' or '.join(others)}, none of "
            f"{solution.lesson}: give the folder of {solution.lesson}, or grade "
            f"{others[0]}."
        )


def result(
    solution: Solution, submission: Submission, answers: Answers, run: Outcome
) -> Result:
    """A submission's result."""
    general = [note for note in answers.notes if not note.question]
    return Result(
        submission.student,
        submission.file,
        marking.question_results(solution, answers, run, marking.to_run(solution, answers)),
        submission.account,
        submission.problem or answers.problem,
        [*submission.notes, *general],
    )


def check_own(path: Path) -> list[QuestionResult]:
    """A student's notebook by its own checks: `multigpu exercise check NOTEBOOK`.

    Raises UserError if the notebook cannot be read.
    """
    notebook = read(path, "", released=True)
    texts = notebook.answers()
    with Pool(1, notebook.seconds) as pool, temporary.folder() as folder:
        runner = Runner(notebook, pool, folder, "visible", None, own_needs=True)
        [(_, run)] = runner.run({"notebook": texts})
    return marking.question_results(notebook, Answers(texts), run, texts)


@dataclass
class Runner:
    """Runs the checks on answers, in a pool.

    own_needs   whether an answer calls the student's own other answers, not the solution's, in
                a student's own notebook, which has no outputs to compare with
    """

    solution: Solution
    pool: Pool
    folder: Path
    secret: str
    sandbox: str | None
    own_needs: bool = False

    def check_solution(self, times: int) -> None:
        """Raises UserError unless the solution's own answers pass all checks here.

        times   how many copies run; with one for each job, all jobs start at the same time
        """
        texts = self.solution.answers()
        for _, outcome in self.run({f"solution{number}": texts for number in range(times)}):
            self._check_outcome(outcome)

    def _check_outcome(self, run: Outcome) -> None:
        solution = self.solution
        if run.problem:
            raise UserError(f"{solution.path} cannot be run here: {run.problem}")
        for part in solution.parts:
            status, lines = run.parts.get(part.question, {}).get(part.title, ("right", []))
            if status != "right":
                stored = solution.notebook.cells[part.cell].outputs
                text = "".join(output.get("text", "") for output in stored).strip()
                raise UserError(
                    f"{solution.path}: the solution does not pass its own check here, so "
                    f"nothing was graded. In [{part.number}] {part.title!r}: stored "
                    f"{text!r}, now {' '.join(lines)!r}."
                )

    def run(self, tasks: Mapping[str, dict[str, str]]) -> Iterator[tuple[str, Outcome]]:
        """Run the answers of each task; yield (id, outcome) as they end.

        tasks   by an id of your own: the text of each question's answer, without blank ones

        What the machine could not run, and what took too long while others had the cores, runs
        once more, alone.
        """
        left = dict(tasks)
        for id, outcome in self._outcomes(tasks):
            if not outcome.blocked and not outcome.starved:
                del left[id]
                yield id, outcome
        for id, texts in left.items():
            yield from self._outcomes({id: texts})

    def _outcomes(self, tasks: Mapping[str, dict[str, str]]) -> Iterator[tuple[str, Outcome]]:
        notebooks = [(id, self._write(id, texts)) for id, texts in tasks.items()]
        for id, cells in self.pool.run(notebooks):
            if cells is None:
                yield id, Outcome(problem="the process that runs the checks ended")
            else:
                yield id, marking.outcome(cells, self._record(id), not self.own_needs)

    def _record(self, id: str) -> Path:
        """Where the kernel writes what the checks record."""
        return self.folder / f"{id}.record.json"

    def _write(self, id: str, texts: dict[str, str]) -> Path:
        """Write the notebook that checks the answers. Returns its path."""
        import nbformat

        solution = self.solution
        data = {
            "given": solution.sources("given"),
            "answers": texts,
            "needed": {} if self.own_needs else solution.answers(),
            "needs": {question.name: question.needs for question in solution.questions},
            "secret": self.secret,
            "sandbox": self.sandbox,
        }
        answers = self.folder / f"{id}.json"
        answers.write_text(json.dumps(data), encoding="utf-8")
        calls = (("begin", answers), ("end", self._record(id)))
        first, last = (
            nbformat.v4.new_code_cell(
                f"from multigpu.grading import kernel\nkernel.{name}({str(path)!r})"
            )
            for name, path in calls
        )
        cells = [first]
        for cell, role in zip(solution.notebook.cells, solution.roles, strict=True):
            if role in ("setup", "given"):
                cells.append(nbformat.v4.new_code_cell(cell.source))
        for question in solution.questions:
            for part in question.parts if question.name in texts else ():
                stored = solution.notebook.cells[part.cell]
                cells.append(
                    nbformat.v4.new_code_cell(
                        stored.source,
                        outputs=stored.outputs,
                        execution_count=stored.execution_count or 1,
                        metadata={"part": [part.question, part.title]},
                    )
                )
        notebook = self.folder / f"{id}.ipynb"
        made = nbformat.v4.new_notebook(cells=[*cells, last])
        notebook.write_text(dumps(made), encoding="utf-8")
        return notebook


def read_secret(folder: Path) -> str:
    """The text of DIR/secret.txt, which is made at random if there is none.

    A new folder can be read by its owner alone: students may be users of this machine.
    """
    path = folder / SECRET
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic(path) as file:
            file.write_text(secrets.token_hex(16) + "\n")
    return path.read_text().strip()


def _digest(solution: Solution, texts: dict[str, str], secret: str) -> str:
    """A name for what decides on an outcome."""
    cells = [
        [role, cell.source, cell.get("outputs", [])]
        for cell, role in zip(solution.notebook.cells, solution.roles, strict=True)
        if role != "text"
    ]
    versions = [VERSION, version("multigpu"), version("torch")]
    data = [versions, cells, sorted(texts.items()), secret]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:32]


def _stored(folder: Path, id: str) -> Outcome | None:
    try:
        return Outcome(**json.loads((folder / CACHE / f"{id}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _store(folder: Path, id: str, outcome: Outcome) -> None:
    (folder / CACHE).mkdir(parents=True, exist_ok=True)
    with atomic(folder / CACHE / f"{id}.json") as file:
        file.write_text(json.dumps(asdict(outcome)))
