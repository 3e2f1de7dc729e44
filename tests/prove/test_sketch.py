"""Sketches estimate distances, and add up over the parts of a tensor."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from multigpu.prove.inside.parts import _blocks
from multigpu.prove.sketch import SUMS, sketch

SIZES = (1, 10, 64, 65, 511, 512, 768, 5_000, 20_000, 70_001, 2_300_000)


def values(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numel", SIZES)
def test_parts_add_up_to_the_whole(numel):
    whole = values(numel)
    cuts = [0, numel // 5, numel // 3, numel]
    parts = [
        sketch(whole[first:last], numel, first)
        for first, last in pairwise(cuts)
        if last > first
    ]
    np.testing.assert_allclose(sum(parts), sketch(whole, numel), rtol=0, atol=1e-3)


def test_the_norm_is_estimated_within_its_deviation():
    for numel in (100, 1_000, 50_000):
        shares = [
            np.linalg.norm(sketch(values(numel, seed), numel))
            / float(values(numel, seed).norm())
            for seed in range(60)
        ]
        # 9%: half of sqrt(2 / 64), because it is the norm and not its square.
        assert abs(np.mean(shares) - 1) < 0.05 and np.std(shares) < 0.13


def test_a_small_tensor_is_its_own_sketch():
    assert sketch(values(7), 7)[:7] == pytest.approx(values(7).numpy())
    assert not sketch(values(7), 7)[7:].any()


def test_one_changed_element_changes_the_sketch_by_as_much():
    for numel in SIZES:
        other = values(numel)
        other[numel // 2] += 3
        distance = np.linalg.norm(sketch(other, numel) - sketch(values(numel), numel))
        assert distance == pytest.approx(3, rel=1e-3)


@pytest.mark.parametrize("numel", SIZES)
def test_a_change_that_all_elements_share_is_seen(numel):
    """As that of a LayerNorm's weights, which begin as ones."""
    share = np.linalg.norm(sketch(torch.ones(numel), numel)) / numel**0.5
    assert 0.4 < share < 1.6


def test_blocks_of_columns_add_up(monkeypatch):
    monkeypatch.setattr("multigpu.prove.inside.parts.SLAB", 100)
    whole = values(40 * 30).view(40, 30)
    total = np.zeros(SUMS)
    for first, last in ((0, 11), (11, 30)):
        for piece, start in _blocks(whole[:, first:last], (40, 30), (0, first)):
            total += sketch(piece, 1200, start)
    np.testing.assert_allclose(total, sketch(whole.reshape(-1), 1200), atol=1e-4)


def test_coarse_numbers_are_added_in_float32():
    numel = 300_000
    exact = sketch(values(numel).bfloat16().float(), numel)
    np.testing.assert_allclose(sketch(values(numel).bfloat16(), numel), exact, atol=1e-3)
