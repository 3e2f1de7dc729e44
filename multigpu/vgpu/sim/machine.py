"""What is running? One set of virtual GPUs a process: their meters, their clock, their random numbers."""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from multigpu.vgpu.sim.clock import Clock
from multigpu.vgpu.sim.cost import Costs
from multigpu.vgpu.sim.memory import Meter
from multigpu.vgpu.sim.presets import Gpu, Link


class Machine:
    """Virtual GPUs from vgpu.start to vgpu.stop."""

    def __init__(self, count: int, gpu: Gpu, link: Link, memory: int, compute: bool):
        self.gpu, self.link, self.compute = gpu, link, compute
        self.meters = [Meter(self, index, memory) for index in range(count)]
        self.devices = [meter.device for meter in self.meters]
        self.clock = Clock(count, gpu, link)
        self.costs = Costs(gpu)
        self.payload = torch.device("cpu" if compute else "meta")
        self.process = os.getpid()
        # Each GPU has its own random numbers, and torch.manual_seed seeds them all alike, as CUDA's.
        self.generators = [torch.Generator() for _ in range(count)]
        for generator in self.generators:
            generator.manual_seed(torch.initial_seed())

    def label(self) -> str:
        """What every simulated time is labelled with."""
        return f"simulated: {len(self.meters)} × {self.gpu.name}, {self.link.name}"

    def meter(self, device: torch.device) -> Meter:
        """The meter of vgpu:i. Raises CUDA's error for an index that is not there."""
        index = current_index() if device.index is None else device.index
        if not 0 <= index < len(self.meters):
            raise torch.AcceleratorError(
                f"vgpu error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n"
                f"vgpu:{index} was asked for, and there "
                f"{'is 1 virtual GPU' if len(self.meters) == 1 else f'are {len(self.meters)} virtual GPUs'}: "
                f"vgpu.start(count={index + 1}) makes more."
            )
        return self.meters[index]

    def random(self, index: int, func: Callable, args: list, kwargs: dict) -> Any:
        """Call an operation that draws random numbers, with those of the device.

        Operations that take no generator draw from the host's default one: it is lent the device's state.
        """
        default, mine = torch.default_generator, self.generators[index]
        with _default_generator:  # one thread at a time has the default generator
            before = default.get_state()
            default.set_state(mine.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                mine.set_state(default.get_state())
                default.set_state(before)


# CUDA's sentence.
FORKED = (
    "Cannot re-initialize virtual GPUs in forked subprocess. To use virtual GPUs with multiprocessing, "
    "you must use the 'spawn' start method, and call vgpu.start() in the new process."
)
_running: Machine | None = None
_default_generator = threading.Lock()
_index = threading.local()


def running() -> Machine | None:
    return _running


def run(machine: Machine | None) -> None:
    global _running
    _running = machine


def current() -> Machine:
    """The running machine. Raises RuntimeError if there is none, or if this process was forked from the one that started it."""
    if _running is None:
        raise RuntimeError("No virtual GPUs are running: call vgpu.start() first.")
    if _running.process != os.getpid():
        raise RuntimeError(FORKED)
    return _running


def _forked() -> None:
    """In a forked child the tensors' numbers are there, and the threads are not: using one is an error, as on CUDA."""
    for meter in _running.meters if _running else ():
        meter.alive = False


os.register_at_fork(after_in_child=_forked)


def current_index() -> int:
    """The device that `torch.device("vgpu")` means in this thread."""
    return getattr(_index, "value", 0)


def set_current_index(index: int) -> None:
    _index.value = index
