"""Quantisation to bytes: its error, and what is restored exactly."""

import math

import pytest
import torch

from multigpu.strategies.bagua.quantise import compress, decompress


def numbers(kind: str) -> torch.Tensor:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    return {
        "around 0": x,
        "far from 0": x + 1e6,  # float32 steps by 1/16 there
        "far below 0": x - 1e4,
        "tiny": x * 1e-30,
        "tinier than 1 / float32's largest": x * 1e-40,
        "huge": x * 1e37,
        "one far out": torch.cat([x, torch.tensor([1e6])]),
        "two levels": (x > 0).float(),
        "one number": x[:1],
    }[kind]


KINDS = (
    "around 0",
    "far from 0",
    "far below 0",
    "tiny",
    "tinier than 1 / float32's largest",
    "huge",
    "one far out",
    "two levels",
    "one number",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_the_error_is_half_an_interval_at_most(kind, dtype):
    x = numbers(kind).to(dtype)
    # float16 ends at 65504.
    if not x.isfinite().all():
        return
    message = compress(x)
    assert message.dtype == torch.uint8 and message.shape == (len(x) + 8,)
    restored = decompress(message, dtype)
    assert restored.dtype == dtype
    exact = x.double()
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    rounding = 2 * eps * exact.abs().max()
    bound = (exact.max() - exact.min()) / 510 + rounding + 1e-44
    assert (restored.double() - exact).abs().max() <= bound
    if dtype != torch.float64:
        assert restored.max() == x.max() and restored.min() == x.min()


@pytest.mark.parametrize("value", [0.0, -0.3, 1e-38, 123456.789, -3e38])
def test_a_constant_chunk_is_restored_exactly(value):
    x = torch.full((7,), value)
    assert torch.equal(decompress(compress(x)), x)


def test_256_levels_stay_256_levels():
    x = torch.arange(256.0).flip(0) - 100
    assert compress(x)[8:].tolist() == list(range(255, -1, -1))
    assert torch.allclose(decompress(compress(x)), x, rtol=0, atol=3e-5)


def test_a_minimum_that_float32_rounds_up_does_not_wrap_around():
    # float32 has steps of 1/16 here.
    x = torch.tensor([1e6 + 0.04, 1e6 + 0.5, 1e6 + 0.96], dtype=torch.float64)
    assert (decompress(compress(x), torch.float64) - x).abs().max() < 0.04


def test_a_message_is_minimum_maximum_and_levels():
    message = compress(torch.tensor([-1.0, 0.0, 4.1]))
    assert message[:8].view(torch.float32).tolist() == pytest.approx([-1.0, 4.1])
    assert message[8:].tolist() == [0, 50, 255]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_chunk_that_is_not_finite_becomes_nan(bad):
    x = torch.ones(5)
    x[3] = bad
    assert decompress(compress(x)).isnan().all()


def test_a_chunk_whose_range_exceeds_float32_becomes_nan():
    assert decompress(compress(torch.tensor([-3e38, 3e38]))).isnan().all()


def test_rows_are_messages_of_their_own():
    # Messages of 13 bytes: the rows are not aligned for float32.
    x = torch.randn(3, 5) * torch.tensor([[1.0], [100.0], [0.0]])
    messages = compress(x)
    assert messages.shape == (3, 13)
    for row, message in zip(x, messages, strict=True):
        assert torch.equal(message, compress(row))
    assert torch.equal(
        decompress(messages), torch.stack([decompress(message) for message in messages])
    )
