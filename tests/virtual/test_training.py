"""Training gives the CPU's numbers: optimizers, clipping, hooks, autocast, several devices."""

import copy
import inspect

import pytest
import torch
from compare_devices import mlp, sequences, train
from torch import nn

from multigpu.virtual import control

OPTIMIZERS = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


def without_biases():
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 3, bias=False))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(two, name):
    """The default implementation, which is foreach on a GPU; then foreach and fused on
    both."""
    kind = getattr(torch.optim, name)
    # Muon optimizes matrices only.
    make = without_biases if name == "Muon" else mlp

    def difference_with(**options):
        def optimizer(parameters):
            return kind(parameters, lr=1e-2, **options)

        return train(make, sequences(), device=two[1], optimizer=optimizer)[0]

    assert difference_with() <= 1e-6
    for implementation in {"foreach", "fused"} & set(inspect.signature(kind).parameters):
        assert difference_with(**{implementation: True}) == 0


@pytest.mark.parametrize("is_kept", [True, False])
def test_autocast_casts_a_weight_once(two, is_kept):
    torch.manual_seed(0)
    on_cpu = nn.Linear(16, 16, bias=False)
    on_device = copy.deepcopy(on_cpu).to(two[1])
    rows = torch.randn(4, 16)
    since = control.elapsed()
    for layer, place in ((on_cpu, "cpu"), (on_device, two[1])):
        out = rows.to(place)
        with torch.autocast(
            torch.device(place).type, dtype=torch.bfloat16, cache_enabled=is_kept
        ):
            for _ in range(3):
                out = layer(out)
        out.float().sum().backward()
    # The gradients of the three uses are added in bfloat16, or in float32.
    assert torch.equal(on_device.weight.grad.cpu(), on_cpu.weight.grad)
    names = [e.name for e in control.timeline(since).events if e.phase == "forward"]
    # The rows and the weights are cast, and the output to float32.
    assert names.count("_to_copy") == 1 + (1 if is_kept else 3) + 1


def test_a_loss_that_overflows_in_16_bit_is_refused(two):
    """As on CUDA, with the loss that computes from logits in its place."""
    logits = torch.zeros(3, device=two[0])
    with torch.autocast("vgpu", dtype=torch.float16):
        with pytest.raises(RuntimeError, match="BCELoss are unsafe to autocast"):
            nn.functional.binary_cross_entropy(logits.sigmoid(), logits)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, logits)
    assert loss.dtype == torch.float32


def test_autocasts_copies_of_weights_go_at_the_end_of_the_block(two):
    layer = nn.Linear(256, 256, bias=False).to(two[0])
    rows = torch.randn(4, 256, device=two[0])
    before = torch.vgpu.memory_allocated()
    with torch.no_grad(), torch.autocast("vgpu", dtype=torch.bfloat16):
        layer(rows)
        assert torch.vgpu.memory_allocated() - before == 2 * 256 * 256
        with torch.autocast("vgpu"):
            pass
        assert torch.vgpu.memory_allocated() - before == 2 * 256 * 256
    assert torch.vgpu.memory_allocated() == before


@pytest.mark.parametrize("make", [torch.nn.Parameter, torch.clone])
def test_inference_mode_takes_views_of_tensors_from_outside(two, make):
    """Masks and weights are made outside of it; generating text slices them inside."""
    host, on_device = (make(torch.eye(4).to(device)) for device in ("cpu", two[1]))
    for view in (
        lambda x: x[1:, None, :2],
        lambda x: x.view(2, 8)[0],
        lambda x: x.t().detach(),
        lambda x: x.chunk(2)[1],
    ):
        with torch.inference_mode():
            expected, actual = view(host), view(on_device)
            assert actual.is_inference() == expected.is_inference()
            assert torch.equal((actual * 2).cpu(), expected * 2)
        # A tensor that is no inference tensor can be used in a graph.
        assert torch.equal((actual * on_device.sum()).cpu(), expected * host.sum())
    with torch.inference_mode():
        inside = on_device * 2
        assert inside[1:].is_inference()
