"""Start virtual GPUs, read their times and memory, and stop them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from multigpu import nested
from multigpu.errors import UserError, pluralize
from multigpu.virtual.ops import generator as _generator
from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.options import MOST_GPUS
from multigpu.virtual.patches import TABLE, backend
from multigpu.virtual.patches.devices import forget as _forget_devices
from multigpu.virtual.sim import machine as _machine
from multigpu.virtual.sim import notes as _notes
from multigpu.virtual.sim.machine import Machine
from multigpu.virtual.sim.memory import keep_freed_memory
from multigpu.virtual.sim.micro_batches import number_micro_batches as number_micro_batches
from multigpu.virtual.sim.network import Network
from multigpu.virtual.sim.presets import (
    LINKS,
    NETWORKS,
    Gpu,
    Link,
    find_gpus,
    find_preset,
    size_in_bytes,
)
from multigpu.virtual.sim.timeline import Timeline

CATEGORIES = ("weights", "gradients", "optimizer", "workspaces", "activations")


def start(
    count: int | None = None,
    gpu: str | Gpu | Sequence[str | Gpu] = "V100-16GB",
    link: str | Link = "NVLink2",
    memory: int | str | None = None,
    compute: bool = True,
    gpus_per_node: int | None = None,
    between_nodes: str | Link | None = None,
    host_factor: float = 1.0,
) -> list[torch.device]:
    """Start `count` virtual GPUs in this process, and return their devices.

    `gpu` is a name in GPUS or a Gpu, or a list with one for each device; the default `count`
    is the list's length, otherwise 2. `link` is a name in LINKS or a Link. `memory` is each
    device's capacity, in bytes or as text ("64MiB"); the default is the capacity of its GPU.
    With compute=False tensors have shapes but no numbers: a model of any size can then be
    placed, metered and timed. `host_factor` multiplies the time that each operation costs the
    host (sim/host.py): 2 for a host that is half as fast.

    By default all GPUs are in one node. With `gpus_per_node`, `link` joins the GPUs of a node,
    and `between_nodes`, a name in NETWORKS or a Link, joins the nodes; its `adapter` says
    whether each GPU or each node has a network adapter.
    - In one process the devices fill the nodes in order: vgpu:i is on node
      i // gpus_per_node.
    - In a process group of ranks with one virtual GPU each, rank r is on node
      r // gpus_per_node. Ranks with more GPUs fill the nodes in the same way. A process that
      starts the GPUs of several nodes sees all nodes, and each rank uses those that it wants.
    Transfers and collectives inside a node use `link`, the others use `between_nodes`.

    Raises UserError for a bad argument, for an untested version of torch, and if virtual GPUs
    are already running.
    """
    if count is not None and (
        not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_GPUS
    ):
        raise UserError(
            f"count is {count!r}: the number of virtual GPUs is a whole number from 1 to "
            f"{MOST_GPUS}."
        )
    gpus = find_gpus(gpu, count)
    count = len(gpus)
    between = None if between_nodes is None else find_preset(between_nodes, NETWORKS)
    network = Network(find_preset(link, LINKS), between, gpus_per_node)
    if gpus_per_node is not None and count % gpus_per_node and gpus_per_node % count:
        raise UserError(
            f"{pluralize(count, 'GPU')} cannot be divided into nodes of {gpus_per_node}: give "
            f"a gpus_per_node that divides count, or that is a multiple of it."
        )
    if not isinstance(host_factor, (int, float)) or not 0 < host_factor < float("inf"):
        raise UserError(
            f"host_factor is {host_factor!r}: give a number above 0, such as 2 for a host "
            f"that is half as fast."
        )
    capacity = None if memory is None else size_in_bytes(memory)
    if (running_machine := _machine.running()) is not None:
        started = len(running_machine.meters)
        verb = "is" if started == 1 else "are"
        raise UserError(
            f"{pluralize(started, 'virtual GPU')} {verb} running already in this process: "
            f"use what is running, or call multigpu.virtual.control.stop() first. Tensors on "
            f"virtual GPUs cannot be used after that."
        )
    backend.register()
    _forget_devices()
    machine = Machine(gpus, network, capacity, compute, host_factor)
    if compute:
        keep_freed_memory()
    # Set before TABLE.apply(), because some rows of TABLE need the running machine.
    _machine.set_running(machine)
    _machine.set_current_index(0)
    machine.generators = _generator.make_default_generators(machine)
    try:
        TABLE.apply()
    except BaseException:
        _end(machine)
        raise
    return list(machine.devices)


def stop() -> None:
    """Stop the virtual GPUs, and restore what start() has replaced in torch.

    After that, using a tensor of these GPUs raises RuntimeError. If no virtual GPUs are
    running, stop() does nothing.
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
def running(*arguments: Any, **options: Any) -> Iterator[list[torch.device]]:
    """Start virtual GPUs for a `with` block, and stop them at its end.

        with control.running(count=2, memory="64MiB") as devices:

    The arguments are those of start().
    """
    started = start(*arguments, **options)
    try:
        yield started
    finally:
        stop()


def elapsed() -> float:
    """Wait for all devices, and return the host's simulated seconds since start()."""
    return _machine.current().clock.synchronize()


def computes() -> bool:
    """Whether the devices' tensors have numbers: False after start(compute=False)."""
    return _machine.current().compute


def timeline(since: float = 0.0) -> Timeline:
    """The devices' events from `since`, in simulated seconds after start(), until now."""
    machine = _machine.current()
    end = machine.clock.synchronize()
    clock = machine.clock
    names = [str(device) for device in machine.devices]
    notes = _notes.notes_by_event(clock)
    return Timeline(clock.events(), names, since, end, machine.label(), notes)


def marked(text: str) -> AbstractContextManager[None]:
    """Give the computation in a `with` block a text for the timeline.

    With the name of a part, such as "quantise", the timeline's picture draws the operations in
    that part's colour; any other text is written in their boxes.
    """
    return _notes.marked(_machine.current().clock, text)


def memory_held(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[torch.device, dict[str, int]]:
    """Each device's memory by use, in bytes.

    {device: {"weights": …, "gradients": …, "optimizer": …, "workspaces": …, "activations": …}}

    "weights" are the model's parameters and buffers, "gradients" are the parameters' `.grad`,
    and "optimizer" is the tensors in the optimizer's state. "workspaces" are cuBLAS's: torch
    keeps one for forward and one for backward after the first matrix product. "activations"
    are all other tensors on the device: inputs, outputs, and what autograd has saved. Tied
    weights count once.
    """
    machine = _machine.current()
    usage = {meter.device: dict.fromkeys(CATEGORIES, 0) for meter in machine.meters}
    counted_blocks: set[int] = set()
    tensors = {
        "weights": [*model.parameters(), *model.buffers()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "optimizer": nested.tensors(optimizer.state) if optimizer else (),
    }
    for category, members in tensors.items():
        for tensor in members:
            if type(tensor) is VirtualTensor and id(tensor._block) not in counted_blocks:
                counted_blocks.add(id(tensor._block))
                usage[tensor.device][category] += tensor._block.allocation.nbytes
    for meter in machine.meters:
        usage[meter.device]["workspaces"] = sum(
            block.allocation.nbytes for block in meter.workspaces.values()
        )
        counted = sum(usage[meter.device].values())
        usage[meter.device]["activations"] = meter.allocated - counted
    return usage


def devices() -> list[torch.device]:
    """The devices of the running virtual GPUs; an empty list if none are running."""
    machine = _machine.running()
    return list(machine.devices) if machine else []


def label() -> str:
    """The label of all simulated times: "simulated: 2 × V100-16GB, NVLink2".

    With nodes it names both links: "simulated: 4 × V100-16GB, 2 per node: NVLink2 inside,
    HDR200 between".
    """
    return _machine.current().label()
