"""DDP equals the serial run, step by step; without synchronisation the same test fails."""

import json

import instrumented
import pytest
import torch
import torch.nn.functional as F
from commands import INSTRUMENTED, torchrun

STEPS = 5
# name: ranks, global batch, micro-batches, images. The last batch is uneven: 3 images for 2
# ranks; 4 for 3 ranks; 1 for 3 ranks, so that two of them have only repeats; 3 images for
# 2 ranks × 2 micro-batches, of which only the first has images.
CASES = {
    "2 ranks": (2, 8, 1, 35),
    "3 ranks": (3, 9, 1, 40),
    "3 ranks, 1 image left": (3, 9, 1, 37),
    "2 ranks, 2 micro-batches": (2, 8, 2, 35),
}


def serial_steps(kind: str, path, batch: int, lr: float = 0.05) -> list[list[torch.Tensor]]:
    """The parameters after each step of a serial run, with the script's data and model."""
    train, _ = instrumented.lesson.read_digits(path)
    images, labels = train.tensors
    torch.manual_seed(0)
    model = instrumented.MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    steps = []
    for rows in order.split(batch):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        steps.append([p.detach().clone() for p in model.parameters()])
    return steps


def largest_gap(folder, ranks: int, expected: list[list[torch.Tensor]]) -> float:
    """The largest difference to `expected` in any parameter, after any step, on any rank."""
    gaps = []
    for rank in range(ranks):
        for step, values in enumerate(expected, start=1):
            found = torch.load(folder / f"{rank}-{step}.pt")
            assert len(found) == len(values)
            gaps += [(a - b).abs().max().item() for a, b in zip(found, values, strict=True)]
    return max(gaps)


def record(tmp_path, few_digits, case: str, kind: str, more: str = "") -> float:
    ranks, batch, micro_batches, images = CASES[case]
    path = few_digits(images)
    flags = ("--data", path, "--epochs", 1, "--batch-size", batch)
    flags += ("--accumulate", micro_batches, "--out", tmp_path / "out")
    plant = f"record={tmp_path},{kind}{more}"
    done = torchrun(ranks, INSTRUMENTED, *flags, PLANT=plant)
    assert done.returncode == 0, done.stdout
    expected = serial_steps(kind, path, batch)
    assert len(expected) == STEPS
    return largest_gap(tmp_path, ranks, expected)


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, "plain") for case in CASES]
    + [(case, kind) for case in ("2 ranks", "3 ranks") for kind in ("tied", "frozen")],
)
def test_every_parameter_after_every_step(tmp_path, few_digits, case, kind):
    assert record(tmp_path, few_digits, case, kind) < 1e-6


@pytest.mark.parametrize("case", ["2 ranks", "3 ranks"])
def test_without_synchronisation_the_test_fails(tmp_path, few_digits, case):
    assert record(tmp_path, few_digits, case, "plain", ",nosync") > 1e-4


def test_loss_and_accuracy_are_those_of_all_images(tmp_path, few_digits):
    """35 training and 7 test images over 3 ranks, uneven both: each image counts once."""
    path = few_digits()
    flags = ("--data", path, "--out", tmp_path, "--epochs", 1, "--batch-size", 9)
    done = torchrun(3, INSTRUMENTED, *flags)
    assert done.returncode == 0, done.stdout
    reported = json.loads((tmp_path / "metrics.json").read_text())

    train, test = instrumented.lesson.read_digits(path)
    torch.manual_seed(0)
    model = instrumented.CNN()
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total = 0.0
    images, labels = train.tensors
    for rows in order.split(9):
        optimizer.zero_grad()
        losses = F.cross_entropy(model(images[rows]), labels[rows], reduction="none")
        losses.mean().backward()
        total += losses.sum().item()
        optimizer.step()
    assert reported["loss"] == pytest.approx(total / 35, abs=1e-5)

    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    images, labels = test.tensors
    hits = (model(images).argmax(1) == labels).sum().item()
    assert reported["accuracy"] == pytest.approx(hits / 7)


def test_micro_batches_do_not_cost_all_reduces(tmp_path, few_digits):
    """The gradients fit in one bucket: one all-reduce a step, whatever its micro-batches."""
    flags = ("--data", few_digits(32), "--epochs", 1, "--batch-size", 8, "--accumulate", 4)
    plant = f"count={tmp_path / 'count'}"
    done = torchrun(2, INSTRUMENTED, *flags, "--out", tmp_path, PLANT=plant)
    assert done.returncode == 0, done.stdout
    assert int((tmp_path / "count").read_text()) == 4
