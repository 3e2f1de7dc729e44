"""A file is written whole or not at all, also on a full disk; old results are set aside."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from small_disk import small_disk

from multigpu import files, plots
from multigpu.errors import UserError
from multigpu.trainer.loggers import CSVLogger


def save_weights(path: Path) -> None:
    with files.atomic(path) as temporary:
        torch.save(torch.nn.Linear(100, 100).state_dict(), temporary)


WRITERS = {
    "weights": save_weights,
    "json": lambda path: files.write_json(path, list(range(2000))),
    "picture": lambda path: plots.save(plots.figure(3, 3), path.with_suffix(".png")),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_is_named(tmp_path: Path, kind: str):
    """torch.save alone reports `unexpected pos 640 vs 534` of one of its source files."""
    path = tmp_path / "model.png"
    path.write_text("the old one")
    with small_disk(), pytest.raises(UserError) as caught:
        WRITERS[kind](path)
    text = str(caught.value)
    assert "no space left" in text and str(tmp_path) in text and "inline_container" not in text
    assert path.read_text() == "the old one" and os.listdir(tmp_path) == ["model.png"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_for_another_file(tmp_path: Path, monkeypatch, number: int):
    def full(*arguments: object, **keywords: object):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.tempfile, "mkstemp", full)
    with pytest.raises(UserError, match="no space left") as caught:
        files.write_json(tmp_path / "a.json", 1)
    assert ("quota" in str(caught.value)) == (number == errno.EDQUOT)


def test_another_error_is_raised_as_it_is(tmp_path: Path):
    with (
        pytest.raises(RuntimeError, match="inline_container of another kind"),
        files.atomic(tmp_path / "a"),
    ):
        raise RuntimeError("inline_container of another kind")
    with pytest.raises(FileNotFoundError):
        files.write_json(tmp_path / "no folder" / "a.json", 1)
    assert os.listdir(tmp_path) == []


def test_the_csv_logger_on_a_full_disk(tmp_path: Path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.save()
    with small_disk(), pytest.raises(UserError, match=r"metrics\.csv: no space left"):
        for step in range(1, 1000):
            logger.log_metrics({"loss": 1.0}, step=step)
        logger.save()


# ---- results of an earlier run --------------------------------------------------------------


def finished(folder: Path, holds: bool = True) -> None:
    files.write_json(folder / "metrics.json", {"proof": {"holds": holds}})


def kept_proof_holds(folder: Path) -> bool:
    return json.loads((folder / "earlier/metrics.json").read_text())["proof"]["holds"]


def test_results_are_set_aside_and_checkpoints_are_not(tmp_path: Path):
    finished(tmp_path)
    for name in ("last.pt", "last.ckpt", "model.pt", "training.png", "own.txt"):
        (tmp_path / name).write_text(name)
    files.set_aside_results(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["earlier", "last.ckpt", "last.pt", "own.txt"]
    kept = sorted(path.name for path in (tmp_path / "earlier").iterdir())
    assert kept == ["metrics.json", "model.pt", "training.png"]


def test_setting_aside_twice_keeps_the_last_finished_run(tmp_path: Path):
    for holds in (True, False):
        finished(tmp_path, holds)
        files.set_aside_results(tmp_path)
    files.set_aside_results(tmp_path)  # a run that was interrupted has left no results
    assert kept_proof_holds(tmp_path) is False


def test_two_runs_that_begin_at_the_same_time(tmp_path: Path, monkeypatch):
    """The other run moves the file after this one has found it."""
    finished(tmp_path)
    original = Path.mkdir

    def mkdir(path: Path, *arguments: object, **keywords: object) -> None:
        original(path, *arguments, **keywords)
        (tmp_path / "metrics.json").replace(tmp_path / "earlier/metrics.json")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    files.set_aside_results(tmp_path)
    assert kept_proof_holds(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch):
    finished(tmp_path)

    def read_only(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(UserError, match=r"cannot write to the folder .*--out"):
        files.set_aside_results(tmp_path)
