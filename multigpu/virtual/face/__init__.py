"""Virtual GPUs that look like CUDA in this process: "cuda:0", torch.cuda, NCCL.

put_on() starts virtual GPUs and replaces what TABLE lists in torch; take_off() undoes it. To
torch's C++ code the tensors stay on the device type "vgpu" (sim/names.py says why).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from multigpu.errors import UserError
from multigpu.virtual import control
from multigpu.virtual.face import (
    accelerator,
    amp,
    cuda_module,
    cuda_only,
    driver,
    fake_tensors,
    flex_attention,
    kernels,
    nccl,
    random_state,
    recurrent,
    staging,
    streams,
    tensors,
    typed_tensors,
    wall_clock,
    world,
)
from multigpu.virtual.options import Options
from multigpu.virtual.patches.devices import FACE
from multigpu.virtual.patches.replacing import Table
from multigpu.virtual.sim import machine, names

# All that is replaced in torch, with the reasons; patches/__init__.py has what virtual
# GPUs replace by any name.
TABLE = Table(
    (
        *kernels.ROWS,
        *tensors.ROWS,
        *typed_tensors.ROWS,
        *fake_tensors.ROWS,
        *flex_attention.ROWS,
        *driver.ROWS,
        *streams.ROWS,
        *random_state.ROWS,
        *recurrent.ROWS,
        *cuda_module.ROWS,
        *accelerator.ROWS,
        *amp.ROWS,
        *nccl.ROWS,
        *cuda_only.ROWS,
        *staging.ROWS,
        *wall_clock.ROWS,
        *world.ROWS,
    )
)


def is_on() -> bool:
    """Whether virtual GPUs look like CUDA in this process."""
    return names.shown_type() == FACE


def put_on(options: Options | None = None) -> list[torch.device]:
    """Start virtual GPUs that look like CUDA, and return their devices cuda:0, cuda:1, …

    The default options are those of Options(). Raises UserError for options that cannot be
    simulated, and if virtual GPUs or CUDA are in use already in this process.
    """
    options = options or Options()
    if is_on():
        raise UserError(
            "virtual GPUs look like CUDA already in this process: use what is running, or "
            "call multigpu.virtual.face.take_off() first."
        )
    if control.devices():
        raise UserError(
            "virtual GPUs are running in this process by the name vgpu: call "
            "multigpu.virtual.control.stop() first, because their tensors keep that name."
        )
    if torch.cuda.is_initialized():
        raise UserError(
            "this process uses real GPUs already: start virtual GPUs in a new process."
        )
    # torch keeps its own functions in these sets when it first needs them.
    _device_constructors()
    names.set_shown_type(FACE)
    machine.want_alias(options.alias)
    wall_clock.want(options.clock == "simulated")
    world.want(options)
    try:
        started = control.start(
            options.gpus,
            options.models(),
            options.link,
            options.memory,
            compute=not options.shapes_only,
            gpus_per_node=options.gpus_per_node,
            between_nodes=options.between_nodes,
        )
        TABLE.apply()
    except BaseException:
        control.stop()
        names.set_shown_type(names.INNER)
        raise
    return started


@contextmanager
def first_rank(options: Options) -> Iterator[torch.device]:
    """Make this process rank 0 of `options.world`, with a process group: its device cuda:0.

    The other ranks are taken to do the same. At the end the process is as it was before.
    """
    variables = {"RANK": "0", "WORLD_SIZE": f"{options.world}", "LOCAL_RANK": "0"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    before = {name: os.environ.get(name) for name in variables}
    try:
        os.environ.update(variables)
        put_on(options)
        dist.init_process_group("nccl")
        yield torch.device("cuda", 0)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        take_off()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def take_off() -> None:
    """Stop the virtual GPUs and restore torch. Does nothing if they do not look like CUDA."""
    if not is_on():
        return
    try:
        TABLE.undo()
    finally:
        control.stop()
        driver.forget()
        names.set_shown_type(names.INNER)
        machine.set_current_index(0)
