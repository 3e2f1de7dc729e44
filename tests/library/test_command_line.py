"""The command itself: its version, and a package that is not installed."""

import subprocess
import sys

import pytest

import multigpu
from multigpu import cli
from multigpu.grading import grade
from multigpu.grading.results import PartResult, QuestionResult


def test_version():
    command = [sys.executable, "-m", "multigpu.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == multigpu.__version__


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("virtual --gpus two a.py", "--gpus is 'two': give a whole number, such as 2."),
        ("prove --gpus=two a.py", "--gpus is 'two': give a whole number, such as 2."),
        ("virtual --timeout long a.py", "--timeout is 'long': give a number, such as 2."),
        (
            "memory --precision fp16 --model 7b",
            "--precision is 'fp16': give fp32 or bf16-mixed.",
        ),
        ("memory --gpus", "option '--gpus' requires an argument."),
        ("virtual", "missing argument 'COMMAND...': see `multigpu virtual --help`."),
    ],
)
def test_a_wrong_option_is_one_sentence(monkeypatch, capsys, line, sentence):
    monkeypatch.setattr(sys, "argv", ["multigpu", *line.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {sentence}"]


def test_a_missing_package_of_an_extra_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "nbformat", None)
    monkeypatch.setattr(
        sys, "argv", ["multigpu", "exercise", "check", str(tmp_path / "x.ipynb")]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: this command needs the package nbformat: run pip install 'multigpu[lab]', "
        "or make install in a clone."
    )


def test_checks_that_the_machine_could_not_run_are_no_traceback(monkeypatch, capsys):
    part = PartResult("a title", 2, False, "blocked", ["no process for the answer"])
    question = QuestionResult("a", "1. Predict", [part])
    monkeypatch.setattr(grade, "check_own", lambda notebook: [question])
    monkeypatch.setattr(sys, "argv", ["multigpu", "exercise", "check", "x.ipynb"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert ended.value.code == 2 and "1. Predict: not checked, 2 points" in captured.out
    assert "this machine could not run all checks" in captured.err.splitlines()[-1]
