"""A program of the library for every launcher: its ranks meet and add up their numbers.

Rank 0 prints `RANKS ranks, started by LAUNCHER, sum SUM`. With --endless it prints on and on.
"""

import argparse
import time

import torch
import torch.distributed as dist

from multigpu import launch
from multigpu.launch import rendezvous


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = launch.find_world()
    store = rendezvous.open_store(world, torch.device("cpu"))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    total = torch.tensor(world.rank + 1)
    dist.all_reduce(total)
    if world.rank == 0:
        print(f"{world.size} ranks, started by {world.launcher}, sum {total}", flush=True)
    while args.endless:
        if world.rank == 0:
            print("still here", flush=True)
        time.sleep(0.01)
    launch.end_gloo()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--endless", action="store_true")
    launch.start(main, parser.parse_args())
