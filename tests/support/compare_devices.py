"""Train the same model on the CPU and on a virtual GPU, and compare the results."""

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from multigpu import Gpu, Link, Timeline
from multigpu.virtual import control
from multigpu.virtual.sim import machine
from multigpu.virtual.sim.event import Event

Tensor = torch.Tensor


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two modules' parameters, buffers and gradients."""
    pairs = list(zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    for parameter, counterpart in zip(one.parameters(), other.parameters(), strict=True):
        assert (parameter.grad is None) == (counterpart.grad is None)
        if parameter.grad is not None:
            pairs.append((parameter.grad, counterpart.grad))
    return max(
        (a.detach().cpu().double() - b.detach().cpu().double()).abs().max().item()
        for a, b in pairs
    )


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train(
    make: Callable[[], nn.Module],
    *inputs: Tensor,
    device: torch.device,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
) -> float:
    """The difference of two models that train from the same weights and seeds.

    One is on the CPU, the other one on the device.
    """
    torch.manual_seed(0)
    on_cpu = make()
    on_device = copy.deepcopy(on_cpu).to(device)
    for model, place in ((on_cpu, torch.device("cpu")), (on_device, device)):
        torch.manual_seed(1)
        update = optimizer(model.parameters())
        for _ in range(3):
            out = model(*[tensor.to(place) for tensor in inputs])
            out = out[0] if isinstance(out, tuple) else out
            assert out.device == place
            loss = out.float().square().mean()
            update.zero_grad()
            loss.backward()
            update.step()
    assert all(parameter.device == device for parameter in on_device.parameters())
    assert torch.isfinite(loss).item()
    return difference(on_cpu, on_device)


def pipeline(devices: Sequence[torch.device], micro_batches: int) -> Timeline:
    """Forward of eight layers on two devices; each micro-batch goes through both."""
    stages = [
        nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(device)
        for device in devices
    ]
    start = control.elapsed()
    batch = torch.ones(4096, 1024, device=devices[0])
    for micro_batch in batch.chunk(micro_batches):
        stages[1](stages[0](micro_batch).to(devices[1]))
    return control.timeline(since=start)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def sequences() -> torch.Tensor:
    return torch.randn(4, 7, 12, generator=torch.Generator().manual_seed(3))


def encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# Round numbers: 1 TFLOP/s in fp32 and 1 GB/s of memory bandwidth; PCIe 3 to the host.
ROUND = Gpu(
    "round", 2**34, bandwidth=1e9, fp64=1e11, fp32=1e12, tf32=2e12, fp16=4e12, host="PCIe3"
)
# 1 GB/s and 1 ms between devices.
CABLE = Link("cable", bandwidth=1e9, latency=1e-3)


def seconds(event: Event) -> float:
    return event.end - event.start


def last(kind: str = "compute") -> Event:
    """The last event of that kind. The host does not wait for it, as timeline() would."""
    return [event for event in machine.current().clock.events() if event.kind == kind][-1]
