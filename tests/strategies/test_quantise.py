"""A number as a byte: how far off it comes back, and what comes back exactly."""

import math

import pytest
import torch

from multigpu.strategies.bagua.quantise import compress, expand


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
    "around 0", "far from 0", "far below 0", "tiny", "tinier than 1 / float32's largest", "huge", "one far out",
    "two levels", "one number",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_what_comes_back_is_off_by_half_an_interval_at_most(kind, dtype):
    x = numbers(kind).to(dtype)
    if not x.isfinite().all():
        return  # float16 ends at 65504
    message = compress(x)
    assert message.dtype == torch.uint8 and message.shape == (len(x) + 8,)
    back = expand(message, dtype)
    assert back.dtype == dtype
    exact = x.double()
    rounding = (
        2 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * exact.abs().max()
    )
    assert (back.double() - exact).abs().max() <= (
        exact.max() - exact.min()
    ) / 510 + rounding + 1e-44
    if dtype != torch.float64:
        assert back.max() == x.max() and back.min() == x.min()  # the ends come back exactly


@pytest.mark.parametrize("value", [0.0, -0.3, 1e-38, 123456.789, -3e38])
def test_a_constant_chunk_comes_back_exactly(value):
    x = torch.full((7,), value)
    assert torch.equal(expand(compress(x)), x)


def test_256_levels_stay_256_levels():
    x = torch.arange(256.0).flip(0) - 100
    assert compress(x)[8:].tolist() == list(range(255, -1, -1))
    assert torch.allclose(expand(compress(x)), x, rtol=0, atol=3e-5)


def test_ends_that_float32_rounds_inwards_do_not_wrap_around():
    x = torch.tensor(
        [1e6 + 0.04, 1e6 + 0.5, 1e6 + 0.96], dtype=torch.float64
    )  # float32 has sixteenths here
    assert (expand(compress(x), torch.float64) - x).abs().max() < 0.04


def test_a_message_says_what_its_bytes_are():
    message = compress(torch.tensor([-1.0, 0.0, 4.1]))
    assert message[:8].view(torch.float32).tolist() == pytest.approx([-1.0, 4.1])
    assert message[8:].tolist() == [0, 50, 255]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_does_not_vanish(bad):
    x = torch.ones(5)
    x[3] = bad
    assert expand(compress(x)).isnan().all()


def test_a_range_too_large_for_float32_does_not_vanish():
    assert expand(compress(torch.tensor([-3e38, 3e38]))).isnan().all()


def test_rows_are_messages_of_their_own():
    x = torch.randn(3, 5) * torch.tensor(
        [[1.0], [100.0], [0.0]]
    )  # messages of 13 bytes: rows start at odd addresses
    messages = compress(x)
    assert messages.shape == (3, 13)
    for row, message in zip(x, messages, strict=True):
        assert torch.equal(message, compress(row))
    assert torch.equal(
        expand(messages), torch.stack([expand(message) for message in messages])
    )
