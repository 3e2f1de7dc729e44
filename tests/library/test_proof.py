"""The proof's numbers: a NaN in any parameter or image makes the proof fail."""

import pytest
import torch
from torch import nn

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
