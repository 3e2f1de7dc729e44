"""torch.nn.attention.flex_attention gives the results of attention with a mask on the CPU."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from multigpu.virtual import left_out
from multigpu.virtual.face.flex_attention import UNFUSED

LENGTH = 128
FAR = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def causal(batch, head, row, column):
    return row >= column


def inputs(device):
    """Query, key and value of 2 heads, and a slope for each head; all need gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, LENGTH, 8)] * 3 + [(2,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor.to(device).requires_grad_() for tensor in tensors]


def gradients(out, tensors):
    out.square().sum().backward()
    return [tensor.grad.cpu() for tensor in tensors]


def test_out_and_gradients_are_the_cpus(cuda):
    *heads, slopes = tensors = inputs("cuda")
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cuda")

    def sloped(score, batch, head, row, column):
        return score + slopes[head] * (row - column)

    out = torch.compile(flex_attention)(*heads, score_mod=sloped, block_mask=mask)
    *on_cpu, slopes_on_cpu = all_on_cpu = inputs("cpu")
    bias = torch.where(FAR >= 0, slopes_on_cpu[:, None, None] * FAR, -torch.inf)[None]
    expected = F.scaled_dot_product_attention(*on_cpu, attn_mask=bias)
    assert out.device == torch.device("cuda:0")
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
    for actual, right in zip(
        gradients(out, tensors), gradients(expected, all_on_cpu), strict=True
    ):
        torch.testing.assert_close(actual, right, atol=1e-4, rtol=1e-4)


def test_autocast_and_inference_mode(cuda, monkeypatch, capsys):
    monkeypatch.setattr(left_out, "notes", [])
    monkeypatch.setenv("RANK", "0")
    heads = inputs("cuda")[:3]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        halves = flex_attention(*heads)
    with torch.inference_mode():
        inside = flex_attention(*heads)
    halves.float().sum().backward()
    assert halves.dtype is torch.bfloat16 and heads[0].grad.dtype is torch.float32
    assert inside.is_inference()
    torch.testing.assert_close(halves.float(), inside, atol=0.02, rtol=0.02)
    assert capsys.readouterr().err.count(UNFUSED) == 1
