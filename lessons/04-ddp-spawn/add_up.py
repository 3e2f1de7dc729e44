"""Two processes add up their numbers: mp.spawn and one all-reduce, in plain torch.

python lessons/04-ddp-spawn/add_up.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, world_size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    number = torch.tensor([10.0 + rank])
    dist.all_reduce(number)  # replaces it by the sum over all ranks
    if rank == 0:
        print(f"rank {rank} of {world_size}: the sum of 10 and 11 is {number.item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(work, args=(2, store.port), nprocs=2)  # calls work(0, 2, port), work(1, 2, port)
