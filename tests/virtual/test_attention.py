"""Attention on virtual GPUs: the kernels that a program allows, DTensor, flex_attention."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from multigpu.virtual import control, left_out
from multigpu.virtual.face.flex_attention import UNFUSED

FLASH = SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
CUDNN = SDPBackend.CUDNN_ATTENTION


def heads(device, dtype=torch.float32, width=8):
    """Queries, keys and values of 2 sequences with 4 heads and 6 tokens."""
    source = torch.Generator().manual_seed(0)
    data = torch.randn(3, 2, 4, 6, width, generator=source)
    return [part.to(device, dtype).requires_grad_() for part in data.unbind()]


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (EFFICIENT, torch.float32),
        (EFFICIENT, torch.bfloat16),
        (FLASH, torch.bfloat16),
        (CUDNN, torch.bfloat16),
        ([FLASH, EFFICIENT], torch.float32),
        (SDPBackend.MATH, torch.float32),
    ],
)
def test_the_kernels_that_a_program_allows(two, kernel, dtype):
    """A fused kernel is the CPU's, bit for bit; and forward's kernel is backward's."""
    results = []
    allowed = SDPBackend.MATH if kernel is SDPBackend.MATH else FLASH
    for place, chosen in ((two[0], kernel), ("cpu", allowed)):
        tensors = heads(place, dtype)
        with sdpa_kernel(chosen):
            out = F.scaled_dot_product_attention(*tensors, is_causal=True)
        out.sum().backward()
        results.append([out.detach().cpu(), *(tensor.grad.cpu() for tensor in tensors)])
    assert all(map(torch.equal, *results))
    names = [event.name for event in control.timeline().events]
    assert any("flash" in name for name in names) == (kernel is not SDPBackend.MATH)


def test_kernels_that_do_not_take_the_call(two):
    tensors = heads(two[0])
    halves = heads(two[0], torch.float16)
    wide = heads(two[0], torch.float16, width=264)
    mask = torch.zeros(6, 6, dtype=torch.float16, device=two[0])
    doubles = heads(two[0], torch.float64)
    for kernel, arguments in (
        (FLASH, tensors),
        (CUDNN, tensors),
        (FLASH, [*halves, mask]),
        (FLASH, wide),
        (EFFICIENT, doubles),
    ):
        message = "No available kernel. Aborting execution."
        with sdpa_kernel(kernel), pytest.raises(RuntimeError, match=message):
            F.scaled_dot_product_attention(*arguments)
    with sdpa_kernel([]), pytest.raises(RuntimeError, match="No viable backend"):
        F.scaled_dot_product_attention(*tensors)
    with sdpa_kernel(EFFICIENT):
        assert F.scaled_dot_product_attention(*halves, mask).shape == (2, 4, 6, 8)
        # The CPU's fused kernel has no dropout, but a GPU's has.
        assert F.scaled_dot_product_attention(*tensors, dropout_p=0.5).shape == (2, 4, 6, 8)


def test_the_kernel_that_cuda_has_for_masks(two):
    """DTensor's rules name it: with its gradients, also the mask's."""
    tensors = [*heads(two[0]), torch.randn(2, 4, 6, 6, device=two[0], requires_grad=True)]
    attend = torch.ops.aten._scaled_dot_product_efficient_attention

    def by_hand(query, key, value, mask):
        return (query @ key.mT * 8**-0.5 + mask).softmax(-1) @ value

    fused = attend(*tensors, True)[0]
    grads = torch.autograd.grad(fused.square().sum(), tensors)
    expected = torch.autograd.grad(by_hand(*tensors).square().sum(), tensors)
    for actual, right in zip([fused, *grads], [by_hand(*tensors), *expected], strict=True):
        assert torch.allclose(actual, right, atol=1e-5)
    with pytest.raises(NotImplementedError, match="has no dropout"):
        attend(*tensors, True, 0.5)


def test_the_time_of_both_fused_kernels_is_the_same():
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    with control.running(count=1, gpu="A100-40GB", compute=False) as (device,):
        tensors = [
            torch.empty(8, 16, 1024, 64, device=device, dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        ]
        F.scaled_dot_product_attention(*tensors, is_causal=True).sum().backward()
        attend(*tensors, None, True, 0.0, True)[0].sum().backward()
        events = [e for e in control.timeline().events if "attention" in e.name]
        seconds = [event.end - event.start for event in events]
    assert seconds[2:] == pytest.approx(seconds[:2], rel=0.01)


@pytest.fixture
def mesh(two):
    """A mesh of two devices; this process is its first rank, and the other does nothing."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield DeviceMesh("vgpu", [0, 1])
    dist.destroy_process_group()


@pytest.mark.slow
def test_heads_of_dtensor(mesh):
    """Tensor parallelism: each rank has some heads, and torch adds no mask to them."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    by_head = [Shard(1)]
    local = [tensor.detach() for tensor in heads("vgpu:0")]
    query, key, value = (DTensor.from_local(x, mesh, by_head) for x in local)
    query.requires_grad_()
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert list(out.placements) == by_head
    expected = F.scaled_dot_product_attention(*local, is_causal=True)
    assert torch.equal(out.to_local(), expected)
    out.to_local().sum().backward()
    assert list(query.grad.placements) == by_head

    mask = torch.ones(6, 6, dtype=torch.bool, device="vgpu:0").tril()
    everywhere = DTensor.from_local(mask, mesh, [Replicate()])
    masked = F.scaled_dot_product_attention(query, key, value, attn_mask=everywhere)
    assert torch.allclose(masked.to_local(), expected, atol=1e-6)

    # Two heads of keys and values for the four heads of queries.
    groups = [x[:, :2] for x in local[1:]]
    shared = [DTensor.from_local(x, mesh, by_head) for x in groups]
    grouped = F.scaled_dot_product_attention(query, *shared, is_causal=True, enable_gqa=True)
    repeated = [x.repeat_interleave(2, 1) for x in groups]
    expected = F.scaled_dot_product_attention(local[0], *repeated, is_causal=True)
    assert torch.allclose(grouped.to_local(), expected, atol=1e-6)


def test_tensors_without_elements(two):
    """The CPU's fused kernel ended the process."""
    rows = torch.empty(2, 0, 6, 8, device=two[0], requires_grad=True)
    out = F.scaled_dot_product_attention(rows, rows, rows)
    out.sum().backward()
    assert out.shape == rows.grad.shape == (2, 0, 6, 8)


# ---- flex_attention ----

UNCOMPILED = "ignore:flex_attention called without torch.compile"
LENGTH = 128
FAR = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)


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


@pytest.mark.filterwarnings(UNCOMPILED)
def test_flex_attention_has_the_results_of_a_mask(cuda):
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


@pytest.mark.filterwarnings(UNCOMPILED)
def test_flex_attention_with_autocast_and_in_inference_mode(cuda, monkeypatch, capsys):
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
