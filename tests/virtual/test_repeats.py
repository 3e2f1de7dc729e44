"""Kernels on shapes that have run before: which calls are known, and what they return."""

import pytest
import torch

from multigpu.virtual import control
from multigpu.virtual.ops import repeats
from multigpu.virtual.ops.dispatch import info_of

aten = torch.ops.aten


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(repeats, "_recipes", {})
    with control.running(count=1, compute=False) as (device,):
        yield device


@pytest.fixture
def count(monkeypatch):
    """Count the runs of an operation's kernel: count(op) returns a list, one item for each."""

    def counted(func: torch._ops.OpOverload) -> list:
        info = info_of(func)
        kernel = info.kernel
        runs = []

        def counting(*args, **kwargs):
            runs.append(args)
            return kernel(*args, **kwargs)

        monkeypatch.setattr(info, "kernel", counting)
        return runs

    return counted


def test_a_kernel_runs_once_for_the_same_shapes(device, count):
    runs = count(aten.tanh.default)
    arguments = [
        torch.empty(3, 4, device=device),
        torch.empty(4, 3, device=device),
        torch.empty(4, 3, device=device).t(),
        torch.empty(3, 8, device=device)[:, ::2],
        torch.empty(3, 4, device=device, dtype=torch.float64),
    ]
    first = [argument.tanh() for argument in arguments]
    assert len(runs) == len(arguments)
    again = [argument.tanh() for argument in arguments]
    assert len(runs) == len(arguments)
    for argument, one, two in zip(arguments, first, again, strict=True):
        expected = torch.empty_strided(
            argument.shape, argument.stride(), dtype=argument.dtype, device="meta"
        ).tanh()
        for result in (one, two):
            assert result is not argument and result.device == device
            assert (result.shape, result.dtype) == (argument.shape, argument.dtype)
            assert result.stride() == expected.stride()


def test_the_default_dtype_decides_too(device):
    x = torch.empty(5000, dtype=torch.int64, device=device)
    assert (x / x).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_out_returns_it_and_gives_it_the_result_shape(device, count):
    runs = count(aten.mul.out)
    x = torch.empty(3, 4, device=device)
    for _ in range(2):
        out = torch.empty(3, 4, device=device)
        assert torch.mul(x, x, out=out) is out
    assert len(runs) == 1
    for _ in range(2):
        out = torch.empty(0, device=device)
        assert torch.mul(x, x, out=out) is out
        assert out.shape == (3, 4)
    assert len(runs) == 3


def test_arguments_that_overlap_are_left_to_the_kernel(device, count):
    """torch refuses some of them."""
    runs = count(aten.add_.Tensor)
    x = torch.empty(3, 4, device=device)
    for times in (1, 2):
        x[1:].add_(x[:-1])
        assert len(runs) == times


def test_tuples_with_missing_results(device, count):
    runs = count(aten.convolution_backward.default)
    images = torch.empty(2, 3, 8, 8, device=device)
    convolution = torch.nn.Conv2d(3, 5, 3, device=device)
    for with_gradient in (False, True, False, True):
        convolution(images.requires_grad_(with_gradient)).sum().backward()
        assert (images.grad is not None) is with_gradient
        assert convolution.weight.grad.shape == (5, 3, 3, 3)
        assert convolution.bias.grad.shape == (5,)
        images.grad = None
        convolution.zero_grad()
    assert len(runs) == 2


def test_the_number_of_known_calls_is_bounded(device, monkeypatch):
    monkeypatch.setattr(repeats, "MOST", 5)
    x = torch.empty(3, 4, device=device)
    for exponent in range(20):
        assert x.pow(exponent + 0.5).shape == (3, 4)
        assert len(repeats._recipes) <= 5
