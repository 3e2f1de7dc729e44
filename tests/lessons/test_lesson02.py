"""Lesson 02: DataParallel learns what one GPU learns, by hand and by torch's own class."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, run_script, torchrun
from torch import nn

from multigpu import vgpu
from multigpu.models import CNN

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_DataParallel as lesson

PAGE = ROOT / "lessons" / "02-data-parallel"
SCRIPT = ROOT / "scripts" / "PT_CNN_DataParallel.py"
FLAGS = ("--epochs", 2, "--batch-size", 8, "--prove")


def gradients(model: nn.Module, outputs: torch.Tensor) -> list[torch.Tensor]:
    F.cross_entropy(outputs, (torch.arange(len(outputs)) % 10).to(outputs.device)).backward()
    return [p.grad.cpu() for p in model.parameters()]


def difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


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
        with vgpu.running(count) as gpus:
            model.to(gpus[0])
            images = rows.to(gpus[0])
            if how == "by hand":
                outputs = lesson.by_hand(model, images, gpus)
            elif how == "class":
                outputs = nn.DataParallel(model, gpus)(images)
            else:
                outputs = lesson.by_hand(model, images, gpus).detach()
                outputs = torch.cat([model(images[:4]), outputs[4:]])
            found.append(gradients(model, outputs))
    serial, by_hand, real, broken = found
    assert difference(by_hand, serial) < 1e-7
    assert difference(real, serial) < 1e-7
    assert difference(broken, serial) > 1e-4


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_the_run_equals_one_process(tmp_path, npz, devices):
    """35 images in batches of 8: the last batch has 3, so a GPU may get one image, or none."""
    more = ("--devices", devices, "--out", tmp_path / "o")
    done = run_script(SCRIPT, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 0, done.stdout
    assert "limit 1e-05: holds" in done.stdout
    assert done.stdout.count("This machine has no GPU") == 1
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert metrics["devices"] == devices
    assert metrics["device"] == "vgpu"
    assert metrics["world_size"] == 1
    saved = torch.load(tmp_path / "o" / "model.pt")
    assert all(weight.device.type == "cpu" for weight in saved.values())


def test_without_the_sum_of_gradients_the_proof_fails(tmp_path, npz, monkeypatch, capsys):
    """Only the first device's gradients count."""
    from torch.nn.parallel import comm

    try:
        vgpu.start(2)
        monkeypatch.setattr(comm, "reduce_add_coalesced", lambda inputs, *_: tuple(inputs[0]))
        flags = [str(flag) for flag in ("--data", npz(), *FLAGS, "--out", tmp_path)]
        with pytest.raises(SystemExit):
            lesson.main(lesson.parse(flags))
    finally:
        vgpu.stop()
    assert "limit 1e-05: fails" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--devices", 0), "from 1 up"),
        (("--devices", 500), "1 to 128"),
        (("--lr", "3e38"), "lower --lr"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("error: ") == 1
    assert words in done.stdout
    assert "Traceback" not in done.stdout and not list(tmp_path.rglob("model.pt"))


def test_what_the_text_says_about_large_and_small_steps(experiments):
    """The simulated clock gives the same in each run."""
    with vgpu.running(2, gpu="V100-16GB", link="PCIe3", compute=False) as pair:
        small, large = (experiments.breakdown(pair, batch) for batch in (64, 65_536))
        assert small["launch"] > 1 / 2 and small["compute"] < 1 / 5
        assert large["transfer"] == pytest.approx(1 / 4, abs=0.02)
        assert sum(large.values()) == pytest.approx(1)
        assert experiments.speedup(pair, 65_536) == pytest.approx(1.64, abs=0.005)
    with vgpu.running(2, gpu="V100-16GB", link="NVLink2", compute=False) as pair:
        small, large = (experiments.breakdown(pair, batch) for batch in (64, 65_536))
        assert small["launch"] > 3 / 4 and small["compute"] < 1 / 5
        assert large["transfer"] == pytest.approx(1 / 5, abs=0.01)
        assert experiments.speedup(pair, 65_536) == pytest.approx(1.78, abs=0.005)
        assert experiments.break_even(pair) == 850


def test_the_names_of_transfers_say_where_they_go(experiments):
    with vgpu.running(2, compute=False) as pair:
        duration = experiments.seconds(pair, 64, parallel=True)
        step = vgpu.timeline(since=vgpu.elapsed() - duration)
    name = experiments.carried(step)
    assert [name(event) for event in step.events if event.kind == "transfer"] == [
        "images",
        "images ↓",
        "weights ↓",
        "outputs ↑",
        "outputs' gradients ↓",
        "weights' gradients ↑",
    ]


def test_other_gpus_take_the_place_of_the_lessons_own(experiments):
    """So each cell of the notebook can run again, after the sweep or a cell that failed."""
    with vgpu.running(2) as gpus:
        with experiments.other_gpus(4, compute=False) as four:
            assert vgpu.devices() == four and len(four) == 4
        assert vgpu.devices() == gpus and vgpu.computes()
        with pytest.raises(ZeroDivisionError), experiments.other_gpus(1):
            raise ZeroDivisionError
        assert torch.ones(1, device=gpus[1]).item() == 1
    with experiments.other_gpus(1):
        pass
    assert vgpu.devices() == []


def test_a_launcher_is_refused(tmp_path):
    done = torchrun(2, SCRIPT, "--out", tmp_path)
    assert done.returncode != 0, done.stdout
    assert done.stdout.count("is one process, and torchrun started 2") == 1
