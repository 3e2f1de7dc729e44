"""Training gives the CPU's numbers: optimizers, clipping, autocast, DataParallel."""

import copy
import inspect

import pytest
import torch
from compare_devices import mlp, sequences, train
from torch import nn
from torch.nn import functional as F

from multigpu.models.transformer import Transformer
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

        return train(make, sequences(), device=two[1], optimizer=optimizer)

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


# ---- DataParallel ----


def test_data_parallel_beside_a_real_gpu(two, monkeypatch):
    def no_such_gpu(index: int) -> None:
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", no_such_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = nn.DataParallel(nn.Linear(2, 2).to(two[0]))
    assert model(torch.ones(4, 2)).shape == (4, 2)
    assert model.device_ids == [0, 1]


def test_data_parallel_equals_the_serial_run():
    """The rows are unequal parts, of the host; a gradient is sparse. Lesson 02 has others."""
    torch.manual_seed(0)
    layers = nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2), nn.BatchNorm1d(2)
    serial = nn.Sequential(*layers).double().eval()
    words = torch.tensor([[1, 2], [3, 4], [5, 6], [1, 3], [7, 8]])
    with control.running(2) as devices:
        model = copy.deepcopy(serial).to(devices[0])
        out = nn.DataParallel(model)(words)
        assert out.device == devices[0]
        out.square().sum().backward()
        expected = serial(words)
        expected.square().sum().backward()
        assert torch.allclose(out.cpu(), expected, rtol=1e-12)
        assert model[0].weight.grad.is_sparse
        for one, other in zip(model.parameters(), serial.parameters(), strict=True):
            grad, right = one.grad.to_dense().cpu(), other.grad.to_dense()
            assert torch.allclose(grad, right, rtol=1e-12)


def test_an_error_in_a_replica_names_it(two):
    model = nn.DataParallel(nn.Linear(3, 2).to(two[0]))
    with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 0 on device 0"):
        model(torch.ones(4, 5))
    model.module.to(two[1])
    with pytest.raises(
        RuntimeError, match="module must have its parameters and buffers on device vgpu:0"
    ):
        model(torch.ones(4, 3))


# ---- programs that say cuda ----

TOKENS = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(3))


def gpt() -> nn.Module:
    return Transformer(layers=2, hidden=16, heads=2, tokens=8, vocabulary=11, causal=True)


def train_gpt(device: str, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device == "cuda")
    tokens = TOKENS.to(device)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_the_losses_are_the_cpus(cuda, device):
    assert train_gpt(device) == pytest.approx(train_gpt("cpu"), abs=1e-6, rel=0)


def test_fp16_with_a_scaler(cuda):
    torch.manual_seed(0)
    model = gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    tokens = TOKENS.cuda()
    losses = []
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        assert logits.dtype == torch.float16 and loss.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.is_enabled() and scaler.get_scale() == 2.0**10
    assert losses == pytest.approx(train_gpt("cpu"), abs=5e-3)


def test_a_scaler_leaves_out_a_step_with_infinities(cuda):
    weight = torch.ones(2, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler(init_scale=8.0)
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1] and scaler.get_scale() == 4.0


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp")
def test_all_spellings_of_autocast(cuda):
    layer = nn.Linear(4, 4).cuda()
    rows = torch.ones(2, 4, device="cuda")
    with torch.cuda.amp.autocast():
        assert layer(rows).dtype == torch.float16
        images = torch.ones(1, 1, 4, 4, device="cuda")
        out = nn.Conv2d(1, 2, 3).cuda()(images)
        assert out.dtype == torch.float16
        # The CPU's lists keep layer_norm in 16 bits.
        for again in (out.softmax(1), F.layer_norm(out, (2,))):
            assert again.dtype == torch.float32
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() == torch.float16
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cuda", enabled=False):
            assert layer(rows).dtype == torch.float32
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16, cache_enabled=False):
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert layer(rows).dtype == torch.bfloat16 and layer(rows).sum().dtype == torch.float32
    assert not torch.is_autocast_enabled() and torch.amp.is_autocast_available("cuda")
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert torch.cuda.amp.GradScaler().is_enabled()

    @torch.autocast("cuda")
    def decorated() -> torch.Tensor:
        return layer(rows)

    assert decorated().dtype == torch.float16
    with torch.autocast("cpu"):
        assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == torch.bfloat16
