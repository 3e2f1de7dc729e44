"""What the grader's kernel forgets between two submissions."""

import json
from pathlib import Path

import pytest

from multigpu.exercise.exercise import grade_with
from multigpu.grading import kernel
from multigpu.virtual import control


@pytest.fixture(autouse=True)
def without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS. The limit of memory would hold for the tests' process to its end."""

    def read_text(path: Path, *arguments: str, **options: str) -> str:
        if path.is_relative_to("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return path.read_bytes().decode()

    monkeypatch.setattr(Path, "read_text", read_text)


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
