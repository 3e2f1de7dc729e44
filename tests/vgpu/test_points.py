"""What a second strict review left open: each test was red before its point was mended."""

import pytest
import torch


class Doubled(torch.autograd.Function):
    """Twice the input; its gradient comes back on the device `there`."""

    there: torch.device

    @staticmethod
    def forward(ctx, factor, x):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return None, (2 * grad).to(Doubled.there)


def test_a_gradient_on_another_device(two):
    x = torch.ones(3, device=two[0], requires_grad=True)
    for Doubled.there in (two[1], torch.device("cpu")):
        words = f"Function DoubledBackward returned an invalid gradient at index 0 - expected device vgpu:0 but got {Doubled.there}"
        with pytest.raises(RuntimeError, match=words):
            Doubled.apply(2, x).sum().backward()
        with pytest.raises(
            RuntimeError, match=f"^invalid gradient at index 0 - expected device vgpu:0 but got {Doubled.there}"
        ):
            (x * 2).backward(torch.ones(3, device=Doubled.there))
    plain = torch.ones(3, requires_grad=True)
    Doubled.there = two[0]
    with pytest.raises(RuntimeError, match="expected device cpu but got vgpu:0"):
        Doubled.apply(2, plain).sum().backward()
    assert x.grad is None and plain.grad is None
    one = torch.ones((), device=two[1], requires_grad=True)
    Doubled.apply(2, one).backward()  # one number is moved, as torch does
    assert one.grad.device == two[1] and one.grad.item() == 2
    Doubled.there = two[1]
    Doubled.apply(2, x.to(two[1])).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
