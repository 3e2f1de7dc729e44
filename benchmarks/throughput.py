"""Images/s of lesson 05's train_epoch with two ranks and with one, for lesson05.py.

    throughput.py DATA ROUNDS FILE

One pair of processes measures three cases in turn, each for a second, because a shared
machine's speed changes from minute to minute: both ranks with DDP; rank 0 alone, while rank 1
sleeps in a barrier; both at once without communication, the upper bound on this machine. Each
rank has one thread and micro-batches of 256 images.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from multigpu import files, launch
from multigpu.models import CNN

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import PT_CNN_MultiGPU as lesson

BATCH = 4096
MICRO_BATCH = 256


class Run:
    """What train_epoch needs, for the ranks of `group`."""

    def __init__(self, train: Dataset, rank: int, ranks: int, group: dist.ProcessGroup | None):
        torch.manual_seed(0)
        self.ddp = DDP(CNN((1, 28, 28)), process_group=group)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), 0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.autocast = torch.autocast("cpu", enabled=False)
        sampler = DistributedSampler(train, ranks, rank, seed=0)
        self.loader = DataLoader(train, MICRO_BATCH, sampler=sampler)
        self.accumulate = BATCH // MICRO_BATCH // ranks

    def seconds(self) -> float:
        began = time.perf_counter()
        lesson.train_epoch(**vars(self), device=torch.device("cpu"))
        return time.perf_counter() - began


def work(source: str, rounds: int, out: str) -> None:
    rank, ranks, local_rank = lesson.find_rank()
    lesson.join(rank, ranks, local_rank)
    train, _ = lesson.read_digits(source)
    # Every rank has to take part in making every group.
    groups = [dist.new_group([rank]) for rank in range(ranks)]
    both = Run(train, rank, ranks, None)
    single = Run(train, 0, 1, groups[rank])
    all_reduce = dist.all_reduce
    with_ddp = []
    upper_bound = []
    for _ in range(rounds + 1):
        dist.barrier()
        together = both.seconds()
        # A rank alone has nothing to sum. DDP does not call this function.
        dist.all_reduce = lambda tensor: None
        dist.barrier()
        alone = single.seconds() if rank == 0 else 0.0
        dist.barrier()
        side_by_side = torch.tensor(single.seconds())
        dist.all_reduce = all_reduce
        dist.all_reduce(side_by_side, dist.ReduceOp.MAX)
        with_ddp.append(alone / together)
        # Together, the two ranks did the work of two epochs.
        upper_bound.append(2 * alone / side_by_side.item())
    if rank == 0:
        # The first round warms up.
        files.write_json(out, [with_ddp[1:], upper_bound[1:]])


if __name__ == "__main__":
    launch.call(work, 2, sys.argv[1], int(sys.argv[2]), sys.argv[3])
