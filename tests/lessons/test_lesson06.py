"""Lesson 06: DDP over a model on two devices learns what one device learns, and takes the devices that are its own."""

import json
import sys

import pytest
import torch
from commands import ROOT, SILENT_DDP, planted, run

from multigpu import vgpu

SCRIPT = ROOT / "scripts" / "PT_CNN_HybridParallel.py"
FLAGS = ("--epochs", 2, "--prove")

FAULTS = {
    "no sum of gradients": SILENT_DDP,
    "a piece is lost": "cat = lesson.torch.cat\nlesson.torch.cat = lambda parts: cat([*parts[:-1], parts[-1].detach()])",
    "repeated images count": "lesson.torch.arange = lambda n: lesson.torch.zeros(n, dtype=lesson.torch.long)",
}


@pytest.mark.parametrize(
    ("ranks", "batch", "pieces"), [(1, 8, 2), (2, 8, 1), (2, 12, 3), (3, 12, 2)]
)
def test_replicas_of_stages_equal_one_process(tmp_path, npz, ranks, batch, pieces):
    """35 images: the last batch is uneven, and the sampler repeats some."""
    more = (
        "--batch-size",
        batch,
        "--pieces",
        pieces,
        "--spawn",
        ranks,
        "--out",
        tmp_path / "o",
    )
    done = run("python", SCRIPT, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 0 and "limit 1e-05: holds" in done.stdout, done.stdout
    assert (
        done.stdout.count("This machine has no GPU") == 1 and "Warning" not in done.stdout
    ), done.stdout
    told = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert (told["devices"], told["device"], told["world_size"]) == (2 * ranks, "vgpu", ranks)
    assert all(
        weight.device.type == "cpu"
        for weight in torch.load(tmp_path / "o" / "model.pt").values()
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    more = ("--batch-size", 8, "--spawn", 2, "--out", tmp_path / "o")
    done = run(
        "python",
        planted(tmp_path, "PT_CNN_HybridParallel", FAULTS[fault]),
        "--data",
        npz(),
        *FLAGS,
        *more,
    )
    assert done.returncode == 1 and "limit 1e-05: fails" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--spawn", 2, "--batch-size", 6), "cannot be split evenly over 2 ranks × 2 pieces"),
        (("--spawn", 2, "--pieces", 0), "from 1 up"),
        (("--spawn", 2, "--lr", "3e38"), "lower --lr"),
        (("--spawn", 2, "--data", "no.npz"), "no data file"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    done = run("python", SCRIPT, *flags, "--out", tmp_path / "out")
    assert (
        done.returncode == 2 and done.stdout.count("error: ") == 1 and words in done.stdout
    ), done.stdout
    assert "Traceback" not in done.stdout and not list(tmp_path.rglob("model.pt"))


def test_the_lesson_asks_for_its_ranks_own_gpus(tmp_path, npz):
    path = planted(
        tmp_path,
        "PT_CNN_HybridParallel",
        "gpus = lesson.multigpu.gpus\ndef asked(count, world):\n"
        "    print(f'rank {world.rank} asks for {count}', flush=True)\n    return gpus(count, world)\n"
        "lesson.multigpu.gpus = asked",
    )
    done = run(
        "python",
        path,
        "--data",
        npz(),
        "--epochs",
        1,
        "--batch-size",
        8,
        "--spawn",
        2,
        "--out",
        tmp_path / "o",
    )
    assert "rank 0 asks for 2" in done.stdout and "rank 1 asks for 2" in done.stdout, (
        done.stdout
    )


def test_the_lesson_has_what_it_copies():
    """Lessons 03 and 06 each show the two halves; the layers are the same ones."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import PT_CNN_HybridParallel
    import PT_CNN_ModelParallel

    with vgpu.running(2) as (first, second):
        ours = PT_CNN_HybridParallel.Halves(first, second, 2)
        theirs = PT_CNN_ModelParallel.Halves(first, second)
        assert [(n, p.device, p.shape) for n, p in ours.named_parameters()] == [
            (n, p.device, p.shape) for n, p in theirs.named_parameters()
        ]
