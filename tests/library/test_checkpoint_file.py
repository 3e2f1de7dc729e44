"""A checkpoint file that is damaged, or of another run, is refused in a sentence."""

from pathlib import Path

import pytest
import torch

from multigpu import files
from multigpu.elastic import checkpoint_file
from multigpu.errors import UserError


def parts(width: int = 4) -> dict:
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def write(path: Path, parts: dict) -> Path:
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save(
        {"format": checkpoint_file.FORMAT, "parts": states, "settings": {"--seed": 0}}, path
    )
    return path


def load(path: Path, parts: dict, seed: int = 0) -> None:
    checkpoint_file.compare(path, checkpoint_file.read(path), parts, {"--seed": seed})


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_truncated(tmp_path, keep):
    path = write(tmp_path / "a.pt", parts())
    load(path, parts())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="truncated or not a checkpoint"):
        load(path, parts())


def test_another_model_and_other_settings(tmp_path):
    path = write(tmp_path / "a.pt", parts())
    with pytest.raises(
        UserError, match=r"another model: 0\.weight is \(4, 3\) .* and \(5, 3\)"
    ):
        load(path, parts(width=5))
    with pytest.raises(UserError, match="--seed 0, this run has 1"):
        load(path, parts(), seed=1)


def test_an_optimizer_of_other_parameters(tmp_path):
    made = parts()
    made["optimizer"] = torch.optim.Adam(made["model"][0].parameters())
    with pytest.raises(UserError, match=r"another model: .* \[2\] parameters .* \[4\]"):
        load(write(tmp_path / "a.pt", made), parts())


def test_no_file_and_a_folder(tmp_path):
    with pytest.raises(UserError, match="there is no checkpoint"):
        checkpoint_file.read(tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"is a folder: .*last\.pt"):
        checkpoint_file.read(tmp_path)


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (files.write_json, (str(tmp_path / "evil"), 1))

    torch.save({"format": 1, "parts": Evil()}, tmp_path / "a.pt")
    with pytest.raises(UserError):
        checkpoint_file.read(tmp_path / "a.pt")
    assert not (tmp_path / "evil").exists()
