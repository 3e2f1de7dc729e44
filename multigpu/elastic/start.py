"""The start and the proof of an elastic run."""

import os
import signal
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from multigpu import devices, proof
from multigpu.elastic import signals
from multigpu.elastic.guard import Guard
from multigpu.errors import pluralize
from multigpu.launch import rendezvous
from multigpu.launch.world import find_world


def join(timeout: float, exact: bool = False) -> torch.device:
    """Join the ranks of this start. Returns this rank's device: its GPU, or the CPU.

    A rank that waits longer than `timeout` seconds for the others fails: here, and later in a
    collective. torchrun does not see by itself that a rank of another node never came. With
    `exact` a GPU computes deterministically and in full fp32. If torchrun is killed, its ranks
    get SIGTERM (`Guard`). From the end of this function on, SIGTERM, SIGINT and SIGUSR1 are
    noted, for `signals.add_up`; before, there is nothing to save, so SIGTERM ends the process.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a job file's `trap ""` is inherited
    Guard().start()
    signal.signal(signal.SIGUSR1, signals.note)
    world = find_world()
    device = devices.pick(world, exact=exact)
    dist.init_process_group(
        devices.backend(device),
        store=rendezvous.open_store(world, device, timeout),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signals.note)
    return device


def restarts() -> int:
    """How often torchrun has started the ranks again after a failure, in this command.

    It counts starts that saved nothing, too, which no checkpoint knows.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Run(Protocol):
    """A run as `verdict` needs it: its model, and a position with `curve` and `starts`.

    curve   of each step: the loss, the number of ranks, the number of the start
    """

    ddp: nn.Module
    position: Any


def verdict(run: Run, again: Run) -> dict | None:
    """Compare the weights of a run with those of a run of the present ranks without a stop.

    If all steps had this number of ranks, every bit must be the same, on each rank. Else sums
    in another order differ in the last bits: the limit is 1e-5. Rank 0 prints the line of the
    proof, and returns its values and the curve of `again`; the others return None. All ranks
    call it.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # All compare with rank 0: ranks that have trained apart would each repeat themselves.
    for tensor in again.ddp.state_dict().values():
        dist.broadcast(tensor, 0)
    differences = [0.0] * ranks
    dist.all_gather_object(differences, proof.difference(run.ddp, again.ddp))
    if rank != 0:
        return None
    sizes = sorted({size for _, size, _ in run.position.curve})
    same = sizes == [ranks]
    which = f"{' and '.join(map(str, sizes))} rank{'' if sizes == [1] else 's'}"
    other = "a run" if same else pluralize(ranks, "rank")
    claim = f"{which}, {pluralize(run.position.starts, 'start')}, equal {other} without a stop"
    result = proof.verdict(claim, proof.largest(differences), 0.0 if same else 1e-5)
    return {**result, "curve": again.position.curve}
