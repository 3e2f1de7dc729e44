"""Lesson 02: DataParallel computes what one GPU computes, by hand and by torch's own class."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, planted, run
from torch import nn
from virtual_runs import virtual

import multigpu
from multigpu import prove
from multigpu.models import CNN
from multigpu.notebooks import source
from multigpu.virtual import face

PAGE = ROOT / "lessons" / "02-data-parallel"
SCRIPT = ROOT / "scripts" / "PT_CNN_DataParallel.py"
FLAGS = ("--epochs", 1, "--batch-size", 8)


@pytest.fixture(autouse=True)
def taken_off():
    yield
    face.take_off()


def gradients(model: nn.Module, outputs: torch.Tensor) -> list[torch.Tensor]:
    F.cross_entropy(outputs, (torch.arange(len(outputs)) % 10).to(outputs.device)).backward()
    return [p.grad.cpu() for p in model.parameters()]


def difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def by_hand():
    """The function of the notebook's cell."""
    path = PAGE / "PT_CNN_DataParallel.md"
    cells = [cell.source for cell in source.read(path, ROOT).cells]
    (text,) = (cell for cell in cells if cell.startswith("def by_hand"))
    names = {"torch": torch}
    exec(text.partition("\n\n\n")[0], names)
    return names["by_hand"]


@pytest.mark.parametrize("count", [2, 3])
def test_by_hand_and_the_real_class_give_the_serial_gradients(count):
    """10 rows: uneven chunks. With a chunk's gradients left out, the difference is large."""
    rows = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for how in ("serial", "by hand", "class", "no second chunk"):
        torch.manual_seed(0)
        model = CNN()
        if how == "serial":
            found.append(gradients(model, model(rows)))
            continue
        with multigpu.gpus(count, gpu="V100-16GB") as gpus:
            model.to(gpus[0])
            images = rows.to(gpus[0])
            if how == "by hand":
                outputs = by_hand()(model, images, gpus)
            elif how == "class":
                outputs = nn.DataParallel(model, gpus)(images)
            else:
                outputs = by_hand()(model, images, gpus).detach()
                outputs = torch.cat([model(images[:4]), outputs[4:]])
            found.append(gradients(model, outputs))
    serial, hand, real, broken = found
    assert difference(hand, serial) < 1e-7
    assert difference(real, serial) < 1e-7
    assert difference(broken, serial) > 1e-4


def test_the_script_trains_on_three_gpus(tmp_path, npz):
    """35 images in batches of 8: the last batch has 3, one for each GPU."""
    done = virtual(tmp_path, "--gpus", 3, SCRIPT, "--data", npz(), *FLAGS, "--out", "o")
    assert done.returncode == 0, done.stdout
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert metrics.keys() == {"loss", "accuracy"}
    assert f"loss {metrics['loss']:.4f}" in done.stdout
    CNN().load_state_dict(torch.load(tmp_path / "o" / "model.pt", map_location="cpu"))


def test_without_the_sum_of_gradients_the_proof_fails(in_forks, tmp_path, npz):
    """Only the first GPU's gradients count; as it is, two GPUs equal one."""
    fault = "from torch.nn.parallel import comm\n"
    fault += "comm.reduce_add_coalesced = lambda inputs, *_: tuple(inputs[0])"
    broken = planted(tmp_path, "PT_CNN_DataParallel", fault)
    verdicts = []
    for script in (SCRIPT, broken):
        command = [str(script), "--data", str(npz()), *map(str, FLAGS)]
        verdicts.append(prove.run(command, gpus=2, steps=3).verdict)
    assert verdicts == ["holds", "fails"]


def test_without_gpus_one_sentence_names_the_command(tmp_path):
    done = run(sys.executable, SCRIPT, "--out", tmp_path / "out")
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("\n") == 1 and "multigpu virtual --gpus 2" in done.stdout
    assert not list(tmp_path.iterdir())
