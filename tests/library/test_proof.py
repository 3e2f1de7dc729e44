"""The proof's numbers: a NaN in any parameter or image makes the proof fail."""

import argparse

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from multigpu import proof

NAN = float("nan")


def test_a_nan_behind_finite_numbers_makes_the_proof_fail():
    """Python's max([1e-8, nan]) is 1e-8, so a NaN in a later parameter would go unseen."""
    one = nn.Linear(3, 2)
    other = nn.Linear(3, 2)
    other.load_state_dict(one.state_dict())
    assert proof.difference(one, other) == 0
    with torch.no_grad():
        other.bias[1] = NAN
    assert not proof.verdict("the same", proof.difference(one, other), 1e-5)["holds"]
    with torch.no_grad():
        other.bias[1] = one.bias[1] + 0.25
    assert proof.difference(one, other) == pytest.approx(0.25)


def test_a_later_epochs_nan_makes_the_proof_of_16_bit_fail():
    images = torch.rand(4, 3)
    labels = torch.tensor([0, 1, 0, 1])
    args = argparse.Namespace(epochs=2, lr=1e-9, seed=0)
    model = nn.Linear(3, 2)
    loss = nn.functional.cross_entropy(model(images), labels).item()
    right = (model(images).argmax(1) == labels).double().mean().item()

    def holds(second_loss: float) -> bool:
        rows = [{"test_loss": value, "test_accuracy": right} for value in (loss, second_loss)]
        test = train = TensorDataset(images, labels)
        return proof.compare_metrics_with_serial(
            "16 bit", rows, model, train, test, args, batch_size=4
        )["holds"]

    assert holds(loss)
    assert not holds(NAN)
