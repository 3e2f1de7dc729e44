"""Train the same thing on the CPU and on a virtual GPU, and compare what comes out."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from multigpu import vgpu
from multigpu.vgpu import Gpu, Link
from multigpu.vgpu.sim.clock import Event

Tensor = torch.Tensor


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of two modules' parameters, buffers and gradients."""
    pairs = list(zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            pairs.append((mine.grad, other.grad))
    return max(
        (mine.detach().cpu().double() - other.detach().cpu().double()).abs().max().item()
        for mine, other in pairs
    )


def train(
    make: Callable[[], nn.Module],
    *inputs: Tensor,
    device: torch.device,
    optimizer: Callable = lambda parameters: torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9
    ),
    loss: Callable[[Tensor], Tensor] = lambda out: out.float().square().mean(),
    steps: int = 3,
    after_backward: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[float, float]:
    """Three steps on the CPU and on the device from the same weights and seeds: (the difference, the last loss)."""
    torch.manual_seed(0)
    plain = make()
    there = copy.deepcopy(plain).to(device)
    for model, place in ((plain, torch.device("cpu")), (there, device)):
        torch.manual_seed(1)
        update = optimizer(model.parameters())
        for _ in range(steps):
            out = model(*[tensor.to(place) for tensor in inputs])
            out = out[0] if isinstance(out, tuple) else out
            assert out.device == place
            value = loss(out)
            update.zero_grad()
            value.backward()
            after_backward(model)
            update.step()
    assert all(parameter.device == device for parameter in there.parameters())
    assert torch.isfinite(value).item()
    return difference(plain, there), value.item()


def pipeline(devices, parts):
    halves = [
        nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(device)
        for device in devices
    ]
    start = vgpu.elapsed()
    for part in torch.ones(4096, 1024, device=devices[0]).chunk(parts):
        halves[1](halves[0](part).to(devices[1]))
    return vgpu.timeline(since=start)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def images(n: int = 4) -> torch.Tensor:
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(2))


def sequences() -> torch.Tensor:
    return torch.randn(4, 7, 12, generator=torch.Generator().manual_seed(3))


def tokens() -> torch.Tensor:
    return torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(4))


def encoder(dropout):
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# Round numbers: 1 TFLOP/s and 1 GB/s of memory bandwidth; 1 GB/s and 1 ms between devices; PCIe 3 to the host.
ROUND = Gpu(
    "round", 2**34, bandwidth=1e9, fp64=1e11, fp32=1e12, tf32=2e12, fp16=4e12, host="PCIe3"
)
CABLE = Link("cable", bandwidth=1e9, latency=1e-3)


def last(kind: str = "compute") -> Event:
    """The last event of that kind; without vgpu.timeline(), which makes the host wait."""
    return [event for event in vgpu._current().clock.events() if event.kind == kind][-1]
