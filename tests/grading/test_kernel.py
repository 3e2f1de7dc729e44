"""What the grader's kernel forgets between two submissions."""

import json

import pytest

from multigpu.exercise.exercise import grade_with
from multigpu.grading import kernel
from multigpu.virtual import control


@pytest.fixture(autouse=True)
def without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of memory would hold for the tests' process to its end."""
    monkeypatch.setattr(kernel, "_limit_memory", lambda: None)


def test_the_virtual_gpus_of_the_last_submission_are_stopped(tmp_path):
    sources = {"given": [], "answers": {}, "needed": {}, "needs": {}}
    file = tmp_path / "answers.json"
    file.write_text(json.dumps(sources | {"secret": "s", "sandbox": None}))
    control.start(2)

    kernel.begin(str(file))

    control.start(3)
    control.stop()
    grade_with(None)


def test_what_the_checks_recorded_is_written(tmp_path):
    sources = {"given": [], "answers": {}, "needed": {}, "needs": {}}
    file = tmp_path / "answers.json"
    file.write_text(json.dumps(sources | {"secret": "s", "sandbox": None}))
    kernel.begin(str(file))

    kernel.end(str(tmp_path / "record.json"))

    assert json.loads((tmp_path / "record.json").read_text()) == []
    grade_with(None)
