"""Guesses: what locks an experiment, and the line that compares a guess with the result."""

import subprocess
import sys

import numpy as np
import pytest
from commands import ROOT

from multigpu import lesson
from multigpu.errors import UserError


def printed(capsys, *arguments, **keywords) -> str:
    lesson.compare("it", *arguments, **keywords)
    (line,) = capsys.readouterr().out.splitlines()
    return line


# ---- need -----------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [0, -3, 1.5, np.float32(2), np.int64(3), 10**30])
def test_a_number_unlocks_the_cell(guess):
    lesson.need(guess)
    lesson.need(1, guess)


@pytest.mark.parametrize(
    "guess",
    [None, float("nan"), float("inf"), -float("inf"), "1.8", "", True, [1.8], 1j, print],
)
def test_anything_else_is_one_sentence_that_says_what_to_write(guess):
    with pytest.raises(lesson.GuessNeeded, match="write a number") as error:
        lesson.need(2, guess)
    assert "(2 of 2)" in str(error.value)
    # what IPython prints in place of a traceback
    assert " ".join(error.value._render_traceback_()) == str(error.value)
    with pytest.raises(lesson.GuessNeeded):
        lesson.compare("it", guess, 1.0)


@pytest.mark.parametrize("guess", [None, "gpu 2", 0, 1.0, True, "", ["gpu 0"]])
def test_a_guess_that_is_no_choice_names_the_choices(guess):
    with pytest.raises(lesson.GuessNeeded, match='"GPU 0" or "GPU 1"'):
        lesson.need(guess, choices=("GPU 0", "GPU 1"))
    with pytest.raises(lesson.GuessNeeded, match='"GPU 0" or "GPU 1"'):
        lesson.compare("it", guess, "GPU 1", choices=("GPU 0", "GPU 1"))


def test_a_choice_may_be_written_in_any_case():
    lesson.need(" gpu 1", choices=("GPU 0", "GPU 1"))


# ---- compare --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "result", "more", "facts"),
    [
        (
            1.8,
            0.6349,
            {"unit": "×"},
            ["guess 1.8×,", "result 0.63×:", "the guess is 2.9 times"],
        ),
        (10, 150, {"unit": "MiB", "digits": 0}, ["10 MiB,", "150 MiB:", "result is 15 times"]),
        (1e6, 1234567.8, {"digits": 0}, ["1,000,000,", "1,234,568:", "1.2 times"]),
        (0.63, 0.6349, {}, ["result 0.63: your guess is right"]),
        (100, 103.2, {"digits": 1}, ["result 103.2: less than 5% apart"]),
        (50, 38.24, {"unit": "%", "digits": 0}, ["guess 50%, result 38%: 12 points apart"]),
        (0, 0.5, {}, ["guess 0, result 0.50: 0.50 apart"]),
        (-1, 0.5, {"unit": "ms"}, ["guess -1 ms, result 0.50 ms: 1.50 ms apart"]),
        (3, np.float32(3), {"digits": 0}, ["guess 3, result 3: your guess is right"]),
        # counts: whole numbers without a unit
        (8, 7, {"digits": 0}, ["guess 8, result 7: 1 apart"]),
        (100, np.int64(103), {"digits": 0}, ["guess 100, result 103: 3 apart"]),
        (2, 4, {"digits": 0}, ["result 4: the result is 2.0 times the guess"]),
        (8.5, 7, {"digits": 0}, ["the guess is 1.2 times"]),
        (8, 7.4, {"digits": 0}, ["the guess is 1.1 times"]),
        (8, 7, {"digits": 0, "unit": "ms"}, ["the guess is 1.1 times"]),
    ],
)
def test_numbers(capsys, guess, result, more, facts):
    line = printed(capsys, guess, result, **more)
    assert line.startswith("it: guess ")
    for fact in facts:
        assert fact in line


def test_a_fraction_where_percent_is_meant_gets_a_hint(capsys):
    """Also for 1, as in an exercise. An error of 0.4% is guessed below 1% with a reason."""
    percent = {"unit": "%", "digits": 1}
    for guess in (0.6, 1):
        assert "75, not 0.75" in printed(capsys, guess, 68.0, **percent)
    for guess, result in ((60, 68.0), (0.1, 0.4), (0, 68.0)):
        assert "0.75" not in printed(capsys, guess, result, **percent)
    assert "0.75" not in printed(capsys, 0.6, 68.0, unit="ms")


def test_a_result_that_is_not_finite_is_printed_as_it_is(capsys):
    assert printed(capsys, 2, float("nan")) == "it: guess 2, result nan"
    assert printed(capsys, 2, float("inf")) == "it: guess 2, result inf"


def test_a_noisy_result_prints_one_line(capsys):
    """nbval compares the line: the ratio is that of the rounded result."""
    lines = {printed(capsys, 1, 3 + noise, digits=0) for noise in (-0.4, 0.0, 0.4)}
    assert len(lines) == 1


def test_texts(capsys):
    places = {"choices": ("GPU 0", "GPU 1")}
    assert printed(capsys, "gpu 1", "GPU 1", **places).endswith(
        "result GPU 1: your guess is right"
    )
    assert printed(capsys, "GPU 0", "GPU 1", **places).endswith(
        "result GPU 1: your guess is wrong"
    )
    assert printed(capsys, "fc1", "fc2").endswith("guess fc1, result fc2: your guess is wrong")
    with pytest.raises(lesson.GuessNeeded, match="text"):
        lesson.compare("it", 3, "fc2")


def test_a_result_that_is_no_choice_is_the_lessons_mistake():
    with pytest.raises(ValueError, match="GPU 3"):
        lesson.compare("it", "GPU 0", "GPU 3", choices=("GPU 0", "GPU 1"))


# ---- setup, outside IPython -----------------------------------------------------------------


def test_setup_finds_the_lessons_experiments_without_torch_or_ipython(tmp_path):
    program = (
        "import sys\n"
        "from multigpu import lesson\n"
        "lesson.setup('02-data-parallel')\n"
        "lesson.setup('02-data-parallel')\n"
        "assert sum(path.endswith('02-data-parallel') for path in sys.path) == 1\n"
        "assert not {'torch', 'IPython', 'pexpect', 'psutil'} & set(sys.modules)\n"
        "import experiments\n"
        "print(experiments.__file__)\n"
    )
    for folder in (ROOT / "notebooks", tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith("lessons/02-data-parallel/experiments.py")


@pytest.mark.parametrize("slug", ["02-dataparallel", "", "nothing", "..", "/tmp"])
def test_an_unknown_lesson_is_one_sentence(slug):
    with pytest.raises(UserError, match="02-data-parallel"):
        lesson.setup(slug)
