"""Images/s of lesson 05's own train_epoch, with two ranks and with one, in turn: throughput.py DATA ROUNDS NOTE.

All is measured within one pair of processes, a second each, since a shared machine's speed drifts from minute to minute:
both ranks by DDP; rank 0 alone, while rank 1 sleeps in a barrier; both at once, each by itself, which is the most that
this machine gives to two processes. One thread a rank; micro-batches of 256 images for all.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from multigpu import data, files, launch
from multigpu.models import CNN

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import PT_CNN_MultiGPU as lesson

BATCH = 4096
MICRO_BATCH = 256
START = {"epoch": 0, "step": 0, "seen": [0.0, 0.0]}


def new_run(world: launch.World, train, group) -> lesson.Run:
    """What train_epoch needs, for the ranks of `group`."""
    args = argparse.Namespace(seed=0, amp=False, save_every=None)
    micro_batches = BATCH // MICRO_BATCH // world.size
    batch = data.Batch(BATCH, world.size, micro_batches, MICRO_BATCH)
    torch.manual_seed(0)
    model = DDP(CNN(tuple(train[0][0].shape)), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return lesson.Run(
        args,
        batch,
        world,
        torch.device("cpu"),
        model,
        optimizer,
        torch.amp.GradScaler("cpu", enabled=False),
        None,
    )


def seconds(run: lesson.Run, train) -> float:
    began = time.perf_counter()
    lesson.train_epoch(run, train, START)
    return time.perf_counter() - began


def work(source: str, rounds: int, note: str) -> None:
    world, _ = lesson.set_up(argparse.Namespace(prove=False))
    train, _ = data.load(source)
    groups = [
        dist.new_group([rank]) for rank in range(world.size)
    ]  # every rank makes every group
    both, single = (
        new_run(world, train, None),
        new_run(launch.World(), train, groups[world.rank]),
    )
    sum_over_ranks = lesson.sum_over_ranks
    by_ddp = []
    at_most = []
    for _ in range(rounds + 1):
        dist.barrier()
        together = seconds(both, train)
        lesson.sum_over_ranks = torch.Tensor.tolist  # one rank has nothing to add up
        dist.barrier()
        alone = seconds(single, train) if world.rank == 0 else 0.0
        dist.barrier()
        apart = torch.tensor(seconds(single, train))
        lesson.sum_over_ranks = sum_over_ranks
        dist.all_reduce(apart, dist.ReduceOp.MAX)
        by_ddp.append(alone / together)
        at_most.append(2 * alone / apart.item())  # two epochs' work
    if world.rank == 0:
        files.write_json(note, [by_ddp[1:], at_most[1:]])  # the first round is for warming up


if __name__ == "__main__":
    sys.exit(launch.spawn(work, 2, sys.argv[1], int(sys.argv[2]), sys.argv[3]))
