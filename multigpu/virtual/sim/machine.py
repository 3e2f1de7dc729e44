"""A machine is one set of virtual GPUs, with their memory meters, clock and random generators.

At most one machine runs in a process, and this module holds it.
"""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from multigpu.errors import UserError
from multigpu.virtual.sim import names
from multigpu.virtual.sim.clock import Clock
from multigpu.virtual.sim.cost import Costs
from multigpu.virtual.sim.memory import Meter
from multigpu.virtual.sim.network import Network
from multigpu.virtual.sim.presets import Gpu, models_label

_Generator = torch._C.Generator


def forked_error() -> RuntimeError:
    """CUDA's error for a process that is the fork of one that has used the GPUs."""
    name = names.runtime() if names.shown_type() != names.INNER else "virtual GPUs"
    start = "" if name == "CUDA" else ", and start them in the new process"
    return RuntimeError(
        f"Cannot re-initialize {name} in forked subprocess. To use {name} with "
        f"multiprocessing, you must use the 'spawn' start method{start}."
    )


class NotRunning(UserError, RuntimeError):
    """No virtual GPUs are running. A RuntimeError, as from torch without CUDA."""


class Machine:
    """Virtual GPUs from control.start to control.stop: one for each model in `gpus`.

    Each has `memory` bytes, or its model's if that is None. `costs` are the times of each
    model's operations. With compute=False payloads are shapes (device "meta"); otherwise they
    are on the CPU.
    """

    def __init__(
        self,
        gpus: list[Gpu],
        network: Network,
        memory: int | None,
        compute: bool,
        host_factor: float = 1.0,
    ):
        self.network = network
        self.compute = compute
        self.meters = [
            Meter(self, index, gpu, gpu.memory if memory is None else memory)
            for index, gpu in enumerate(gpus)
        ]
        self.set_costs({gpu: Costs(gpu, host_factor) for gpu in gpus})
        self.devices = [meter.device for meter in self.meters]
        nodes = [self.node(index) for index in range(len(gpus))]
        self.clock = Clock(gpus, network, nodes)
        self.payload_device = torch.device("cpu" if compute else "meta")
        self.process = os.getpid()
        # As on CUDA, each device has a generator. control.start sets them (ops/generator.py).
        self.generators: list[torch.Generator] = []

    def in_use(self) -> bool:
        """Whether a program has made a tensor on one of the devices, or has tried to."""
        return any(meter.num_allocations or meter.num_ooms for meter in self.meters)

    def label(self) -> str:
        """The label of every simulated time: "simulated: 2 × V100-16GB, NVLink2"."""
        models = models_label([meter.gpu for meter in self.meters])
        return f"simulated: {models}, {self.network.label()}"

    def set_costs(self, costs: Mapping[Gpu, Costs]) -> None:
        """Let the operations take the times of `costs` from now on."""
        self.costs = dict(costs)
        for meter in self.meters:
            meter.costs = self.costs[meter.gpu]

    def node(self, index: int, rank: int = 0) -> int:
        """The node of device `index` of the process with this rank; 0 without nodes.

        If the process has the GPUs of several nodes, it sees all the nodes, and the rank does
        not matter. Otherwise the ranks fill the nodes in order: with one GPU per process,
        rank r is on node r // gpus_per_node.
        """
        per_node = self.network.gpus_per_node
        count = len(self.meters)
        if per_node is not None and count <= per_node:
            index += rank * count
        return self.network.node(index)

    def meter(self, device: torch.device) -> Meter:
        """The meter of a virtual device; without an index, that of this thread's current one.

        Raises torch.AcceleratorError with CUDA's message for an index that does not exist.
        """
        index = current_index() if device.index is None else index_named(device.index)
        count = len(self.meters)
        if not 0 <= index < count:
            existing = "is 1 virtual GPU" if count == 1 else f"are {count} virtual GPUs"
            more = index + 1
            start = names.option(f"count={more}", f"--gpus {more}", f"{more}")
            raise torch.AcceleratorError(
                f"{names.runtime()} error: invalid device ordinal\n"
                f"GPU device may be out of range, do you have enough GPUs?\n"
                f"There is no {names.shown_type()}:{index}, because there {existing}: "
                f"start more with {start}."
            )
        return self.meters[index]

    def random(self, index: int, func: Callable, args: list, kwargs: dict) -> Any:
        """Call `func`, which draws random numbers, with the generator state of device `index`.

        Use this for a call without a generator: it draws from the host's default generator,
        so that generator has the device's state during the call.
        """
        default = torch.default_generator
        generator = self.generators[index]
        with _default_generator_lock:
            before = default.get_state()
            # For programs, a device's generator has a state of another form.
            default.set_state(_Generator.get_state(generator))
            try:
                return func(*args, **kwargs)
            finally:
                _Generator.set_state(generator, default.get_state())
                default.set_state(before)


# The state of the process. torch passes no machine to the kernels and the module of a device
# type, so this variable holds the running machine. start calls set_running(machine), and
# control.stop calls set_running(None).
_running: Machine | None = None
# The current device of each thread, as in torch.cuda.
_current_device = threading.local()
# All threads share the host's default generator: with this lock, one thread uses it at a time.
_default_generator_lock = threading.Lock()


def set_running(machine: Machine | None) -> None:
    """Set the running machine; None means that no machine runs."""
    global _running
    _running = machine


def running() -> Machine | None:
    """The running machine, or None."""
    return _running


def current() -> Machine:
    """The running machine.

    Raises NotRunning if no machine runs, and RuntimeError if another process started the
    machine and this process is its fork.
    """
    if _running is None:
        raise NotRunning(
            "no virtual GPUs are running, which have the simulated clock and the meters: call "
            "multigpu.gpus(2) first, or on a machine with GPUs multigpu.gpus(2, gpu=…)."
        )
    if _running.process != os.getpid():
        raise forked_error()
    return _running


def _after_fork() -> None:
    """In a forked child: use the machine if its parent has not used it, as on CUDA.

    Otherwise the child has the numbers but not the threads, so using a tensor raises.
    """
    if _running is None:
        return
    if not _running.in_use():
        _running.process = os.getpid()
        return
    for meter in _running.meters:
        meter.alive = False


os.register_at_fork(after_in_child=_after_fork)


class _Alias:
    """Whether each index names device 0: cuda:1 is then another name of cuda:0."""

    wanted = False


def want_alias(wanted: bool) -> None:
    """Choose, before virtual GPUs start, whether each index names device 0."""
    _Alias.wanted = wanted


def index_named(index: int) -> int:
    """The index of the device that a program means by `index`."""
    return 0 if _Alias.wanted else index


def current_index() -> int:
    """The index of the device that `torch.device("vgpu")` means in this thread."""
    return getattr(_current_device, "index", 0)


def set_current_index(index: int) -> None:
    """Set the index of the device that `torch.device("vgpu")` means in this thread."""
    _current_device.index = index
