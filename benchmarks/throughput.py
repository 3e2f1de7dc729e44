"""Images/s of lesson 05's train_epoch with two ranks and with one, for lesson05.py.

    throughput.py DATA ROUNDS FILE

One pair of processes measures three cases in turn, each for a second, because a shared
machine's speed changes from minute to minute: both ranks with DDP; rank 0 alone, while rank 1
sleeps in a barrier; both at once without communication, the upper bound on this machine. Each
rank has one thread and micro-batches of 256 images.
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
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return lesson.Run(args, batch, world, torch.device("cpu"), model, optimizer, scaler, None)


def seconds(run: lesson.Run, train) -> float:
    began = time.perf_counter()
    lesson.train_epoch(run, train, START)
    return time.perf_counter() - began


def work(source: str, rounds: int, out: str) -> None:
    world, _ = lesson.set_up(argparse.Namespace(prove=False))
    train, _ = data.load(source)
    # Every rank has to take part in making every group.
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    both = new_run(world, train, None)
    single = new_run(launch.World(), train, groups[world.rank])
    all_reduce = lesson.sum_over_ranks
    with_ddp = []
    upper_bound = []
    for _ in range(rounds + 1):
        dist.barrier()
        together = seconds(both, train)
        # A rank alone has nothing to sum.
        lesson.sum_over_ranks = torch.Tensor.tolist
        dist.barrier()
        alone = seconds(single, train) if world.rank == 0 else 0.0
        dist.barrier()
        side_by_side = torch.tensor(seconds(single, train))
        lesson.sum_over_ranks = all_reduce
        dist.all_reduce(side_by_side, dist.ReduceOp.MAX)
        with_ddp.append(alone / together)
        # Together, the two ranks did the work of two epochs.
        upper_bound.append(2 * alone / side_by_side.item())
    if world.rank == 0:
        # The first round warms up.
        files.write_json(out, [with_ddp[1:], upper_bound[1:]])


if __name__ == "__main__":
    sys.exit(launch.spawn(work, 2, sys.argv[1], int(sys.argv[2]), sys.argv[3]))
