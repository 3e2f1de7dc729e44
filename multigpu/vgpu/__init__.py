"""What is a virtual GPU, and how is it used? A torch device for machines without GPUs.

`vgpu:0 … vgpu:k` compute real numbers on the CPU, raise CUDA's errors, meter memory and run a simulated clock.

    from multigpu import vgpu
    first, second = vgpu.start(count=2, gpu="V100-16GB", link="NVLink2")
    model.to(first)
    torch.vgpu.memory_allocated(first)
    vgpu.timeline().plot("step.png")
    vgpu.stop()
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multigpu.errors import UserError
from multigpu.vgpu.ops import usage
from multigpu.vgpu.patches import backend, device_module
from multigpu.vgpu.sim import machine as _machine
from multigpu.vgpu.sim.machine import Machine
from multigpu.vgpu.sim.memory import keep_freed_memory
from multigpu.vgpu.sim.presets import GPUS, LINKS, Gpu, Link, named, size_in_bytes
from multigpu.vgpu.sim.timeline import Timeline

__all__ = [
    "GPUS",
    "LINKS",
    "Gpu",
    "Link",
    "Timeline",
    "computes",
    "devices",
    "elapsed",
    "label",
    "memory_held",
    "running",
    "start",
    "stop",
    "timeline",
]


def start(
    count: int = 2,
    gpu: str | Gpu = "V100-16GB",
    link: str | Link = "NVLink2",
    memory: int | str | None = None,
    compute: bool = True,
) -> list[torch.device]:
    """Start `count` virtual GPUs in this process, and give their devices.

    `gpu` and `link` are names of presets (GPUS, LINKS) or a Gpu and a Link of your own. `memory` is each device's
    capacity, in bytes or as "64MiB"; without it, the preset's. With compute=False tensors have shapes and no numbers,
    so that a model of any size can be placed, metered and timed.

    Raises UserError for a bad argument, for a torch version that was not tried, and if virtual GPUs are running.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 128:
        raise UserError(
            f"count is {count!r}: the number of virtual GPUs is a whole number from 1 to 128."
        )
    model, cable = named(gpu, GPUS), named(link, LINKS)
    capacity = model.memory if memory is None else size_in_bytes(memory)
    if (there := _machine.running()) is not None:
        raise UserError(
            f"{len(there.meters)} virtual GPUs are running already in this process: use them, "
            f"or call vgpu.stop() first; their tensors are then gone."
        )
    backend.register(device_module)
    from multigpu.vgpu.patches import hooks  # after registration: it needs the device type

    machine = Machine(count, model, cable, capacity, compute)
    if compute:
        keep_freed_memory()
    _machine.run(machine)
    _machine.set_current_index(0)
    hooks.install(machine)
    return list(machine.devices)


def stop() -> None:
    """Stop the virtual GPUs. Tensors that still live on them are dead: using one raises RuntimeError.

    Without running virtual GPUs it does nothing.
    """
    machine = _machine.running()
    if machine is None:
        return
    from multigpu.vgpu.patches import hooks

    hooks.remove()
    for meter in machine.meters:
        meter.alive = False
    _machine.run(None)


@contextmanager
def running(
    count: int = 2,
    gpu: str | Gpu = "V100-16GB",
    link: str | Link = "NVLink2",
    memory: int | str | None = None,
    compute: bool = True,
) -> Iterator[list[torch.device]]:
    """`with vgpu.running(count=2, memory="64MiB") as devices:` starts them, and stops them at the block's end."""
    started = start(count, gpu, link, memory, compute)
    try:
        yield started
    finally:
        stop()


def elapsed() -> float:
    """Simulated seconds since the start on the host's clock, after it has waited for all devices."""
    return _current().clock.synchronize()


def computes() -> bool:
    """Have the devices' tensors numbers? Not after start(compute=False)."""
    return _current().compute


def timeline(since: float = 0.0) -> Timeline:
    """What the devices have done from `since` (simulated seconds, as `elapsed` gives them) until now."""
    machine = _current()
    end = machine.clock.synchronize()
    return Timeline(
        machine.clock.events(), list(map(str, machine.devices)), since, end, machine.label()
    )


def memory_held(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[torch.device, dict[str, int]]:
    """Who holds each device's memory now, in bytes: {device: {"weights", "gradients", "optimizer", "activations"}}.

    Weights are the model's parameters and buffers, gradients their `.grad`, optimizer the tensors of its state. The
    rest, counted as activations, is what else lives there: what autograd has saved, inputs, outputs.
    """
    return usage.memory_held(_current(), model, optimizer)


def devices() -> list[torch.device]:
    """The devices of the running virtual GPUs; none, if none are running."""
    machine = _machine.running()
    return list(machine.devices) if machine else []


def label() -> str:
    """What simulated times are labelled with: "simulated: 2 × V100-16GB, NVLink2"."""
    return _current().label()


def _current() -> Machine:
    if _machine.running() is None:
        raise UserError("no virtual GPUs are running: call vgpu.start() first.")
    return _machine.current()
