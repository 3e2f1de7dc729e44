"""DDP is the serial run, step by step; and the test that says so notices when the synchronisation is gone."""

import json

import instrumented
import pytest
import torch
import torch.nn.functional as F
from commands import INSTRUMENTED, torchrun

from multigpu import data

STEPS = 5
# name: ranks, global batch, pieces, images. The last batch is uneven: 3 images for 2 ranks; 4 for 3 ranks; 1 for 3 ranks,
# so that two of them hold copies only; 3 images for 2 ranks × 2 pieces, of which only one is left.
CASES = {
    "2 ranks": (2, 8, 1, 35),
    "3 ranks": (3, 9, 1, 40),
    "3 ranks, 1 image left": (3, 9, 1, 37),
    "2 ranks, 2 pieces": (2, 8, 2, 35),
}


def serial_steps(kind: str, path, batch: int, lr: float = 0.05) -> list[list[torch.Tensor]]:
    """The parameters after each step of the serial run, in the plainest way: no code of the course but the model."""
    train, test = data.load(path)
    images, labels = train.tensors
    torch.manual_seed(0)
    model = instrumented.MODELS[kind]((1, 8, 8), data.classes(train, test))
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=lr, momentum=0.9)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    steps = []
    for rows in order.split(batch):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        steps.append([p.detach().clone() for p in learning])
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


def record(tmp_path, npz, case: str, kind: str, more: str = "") -> float:
    ranks, batch, pieces, images = CASES[case]
    path = npz(images)
    done = torchrun(
        ranks, INSTRUMENTED, "--data", path, "--out", tmp_path / "out", "--epochs", 1, "--batch-size", batch,
        "--accumulate", pieces, PLANT=f"record={tmp_path},{kind}{more}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    expected = serial_steps(kind, path, batch)
    assert len(expected) == STEPS
    return largest_gap(tmp_path, ranks, expected)


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, "plain") for case in CASES]
    + [(case, kind) for case in ("2 ranks", "3 ranks") for kind in ("tied", "frozen")],
)
def test_every_parameter_after_every_step(tmp_path, npz, case, kind):
    assert record(tmp_path, npz, case, kind) < 1e-6


@pytest.mark.parametrize("case", ["2 ranks", "3 ranks"])
def test_without_synchronisation_the_test_fails(tmp_path, npz, case):
    assert record(tmp_path, npz, case, "plain", ",nosync") > 1e-4


def test_the_proof_holds_and_fails_when_it_must(tmp_path, npz):
    flags = ("--data", npz(), "--epochs", 2, "--batch-size", 8, "--prove")
    good = torchrun(2, INSTRUMENTED, *flags, "--out", tmp_path / "good")
    assert good.returncode == 0, good.stdout
    assert "limit 1e-05: holds" in good.stdout
    bad = torchrun(2, INSTRUMENTED, *flags, "--out", tmp_path / "bad", PLANT="nosync")
    assert bad.returncode != 0
    assert "limit 1e-05: fails" in bad.stdout
    assert (
        json.loads((tmp_path / "bad" / "metrics.json").read_text())["proof"]["holds"] is False
    )


def test_loss_and_accuracy_are_those_of_all_images(tmp_path, npz):
    """35 training and 7 test images over 3 ranks: nothing comes even, and still each image counts once."""
    path = npz()
    done = torchrun(
        3, INSTRUMENTED, "--data", path, "--out", tmp_path, "--epochs", 1, "--batch-size", 9
    )
    assert done.returncode == 0, done.stdout
    told = json.loads((tmp_path / "metrics.json").read_text())["epochs"][0]

    train, test = data.load(path)
    torch.manual_seed(0)
    model = instrumented.CNN((1, 8, 8), 3)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total = 0.0
    for rows in order.split(9):
        optimizer.zero_grad()
        losses = F.cross_entropy(
            model(train.tensors[0][rows]), train.tensors[1][rows], reduction="none"
        )
        losses.mean().backward()
        total += losses.sum().item()
        optimizer.step()
    assert told["loss"] == pytest.approx(total / 35, abs=1e-5)

    model.load_state_dict(
        torch.load(tmp_path / "last.pt", weights_only=True)["parts"]["model"]
    )
    hits = (model(test.tensors[0]).argmax(1) == test.tensors[1]).sum().item()
    assert told["test_accuracy"] == pytest.approx(hits / 7)


def test_pieces_do_not_cost_all_reduces(tmp_path, npz):
    """The gradients fit in one bucket: one all-reduce a step, however many pieces the step has."""
    done = torchrun(
        2, INSTRUMENTED, "--data", npz(32), "--out", tmp_path, "--epochs", 1, "--batch-size", 8, "--accumulate", 4,
        PLANT=f"count={tmp_path / 'count'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert int((tmp_path / "count").read_text()) == 4
