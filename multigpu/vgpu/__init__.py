"""Virtual GPUs: a torch device for machines without GPUs.

`vgpu:0 … vgpu:k` compute real numbers on the CPU, raise CUDA's errors, meter memory and run a
simulated clock.

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
from multigpu.vgpu.patches import TABLE, backend
from multigpu.vgpu.sim import machine as _machine
from multigpu.vgpu.sim.machine import Machine
from multigpu.vgpu.sim.memory import keep_freed_memory
from multigpu.vgpu.sim.presets import GPUS, LINKS, Gpu, Link, find_preset, size_in_bytes
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
    """Start `count` virtual GPUs in this process, and return their devices.

    `gpu` and `link` are names of presets (GPUS, LINKS), or a Gpu and a Link of your own.
    `memory` is each device's capacity, in bytes or as "64MiB"; without it, the preset's. With
    compute=False tensors have shapes and no numbers, so that a model of any size can be
    placed, metered and timed.

    Raises UserError for a bad argument, for a version of torch that was not tried, and if
    virtual GPUs are running.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 128:
        raise UserError(
            f"count is {count!r}: the number of virtual GPUs is a whole number from 1 to 128."
        )
    gpu = find_preset(gpu, GPUS)
    link = find_preset(link, LINKS)
    capacity = gpu.memory if memory is None else size_in_bytes(memory)
    if (running_machine := _machine.running()) is not None:
        raise UserError(
            f"{len(running_machine.meters)} virtual GPUs are running already in this process: "
            f"use them, or call vgpu.stop() first; their tensors are then gone."
        )
    backend.register()
    machine = Machine(count, gpu, link, capacity, compute)
    if compute:
        keep_freed_memory()
    # Some rows of the table need the running machine.
    _machine.set_running(machine)
    _machine.set_current_index(0)
    try:
        TABLE.apply()
    except BaseException:
        _end(machine)
        raise
    return list(machine.devices)


def stop() -> None:
    """Stop the virtual GPUs, and put back what start() has replaced in torch.

    Tensors that are still on them cannot be used any more: that raises RuntimeError. Without
    running virtual GPUs, stop() does nothing.
    """
    machine = _machine.running()
    if machine is None:
        return
    try:
        TABLE.undo()
    finally:
        _end(machine)


def _end(machine: Machine) -> None:
    for meter in machine.meters:
        meter.alive = False
    _machine.set_running(None)


@contextmanager
def running(
    count: int = 2,
    gpu: str | Gpu = "V100-16GB",
    link: str | Link = "NVLink2",
    memory: int | str | None = None,
    compute: bool = True,
) -> Iterator[list[torch.device]]:
    """`with vgpu.running(count=2, memory="64MiB") as devices:` starts and stops virtual GPUs.

    The arguments are those of start().
    """
    started = start(count, gpu, link, memory, compute)
    try:
        yield started
    finally:
        stop()


def elapsed() -> float:
    """Simulated seconds since start() on the host's clock, after waiting for all devices."""
    return _current().clock.synchronize()


def computes() -> bool:
    """Whether the devices' tensors have numbers: not after start(compute=False)."""
    return _current().compute


def timeline(since: float = 0.0) -> Timeline:
    """What the devices have done from `since`, in simulated seconds, until now."""
    machine = _current()
    end = machine.clock.synchronize()
    names = [str(device) for device in machine.devices]
    return Timeline(machine.clock.events(), names, since, end, machine.label())


def memory_held(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[torch.device, dict[str, int]]:
    """Each device's memory by use, in bytes.

    {device: {"weights": …, "gradients": …, "optimizer": …, "activations": …}}

    "weights" are the model's parameters and buffers, "gradients" their `.grad`, "optimizer"
    the tensors of its state. "activations" are all other tensors on the device: what autograd
    has saved, inputs, outputs.
    """
    return usage.memory_held(_current(), model, optimizer)


def devices() -> list[torch.device]:
    """The devices of the running virtual GPUs; an empty list if none are running."""
    machine = _machine.running()
    return list(machine.devices) if machine else []


def label() -> str:
    """The label of all simulated times: "simulated: 2 × V100-16GB, NVLink2"."""
    return _current().label()


def _current() -> Machine:
    """The running machine. Raises UserError if there is none."""
    if _machine.running() is None:
        raise UserError("no virtual GPUs are running: call vgpu.start() first.")
    return _machine.current()
