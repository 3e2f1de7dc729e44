"""Measure a swap of 540 kB over 100 Mbit/s, with the send or the receive posted first.

`python benchmarks/swap.py`, as root. It writes benchmarks/swap.json: milliseconds, medians of
7. See `swap` in multigpu/strategies/bagua/swap.py.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from multigpu import launch
from multigpu.errors import UserError
from multigpu.files import write_json
from multigpu.launch import rendezvous
from multigpu.network import slow_link

BYTES = 540_000
ROUNDS = 7


def rank() -> None:
    world = launch.find_world()
    store = rendezvous.open_store(world, torch.device("cpu"))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=2)
    peer = 1 - world.rank
    outgoing = torch.zeros(BYTES, dtype=torch.uint8)
    incoming = torch.zeros(BYTES, dtype=torch.uint8)

    def send() -> dist.Work:
        return dist.isend(outgoing, peer)

    def receive() -> dist.Work:
        return dist.irecv(incoming, peer)

    orders = {
        "one_way": [receive if world.rank else send],
        "swap_send_first": [send, receive],
        "swap_receive_first": [receive, send],
    }
    medians = {}
    for name, calls in orders.items():
        times = []
        for _ in range(ROUNDS + 1):
            dist.barrier()
            began = time.perf_counter()
            for work in [call() for call in calls]:
                work.wait()
            dist.barrier()
            times.append(1000 * (time.perf_counter() - began))
        medians[name] = round(statistics.median(times[1:]), 1)
    if world.rank == 0:
        print(medians)
        result = {"bytes": BYTES, "Mbit/s": 100, "ms": medians}
        write_json(Path(__file__).with_suffix(".json"), result)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if sys.argv[1:] == ["rank"]:
        return rank()
    try:
        sys.exit(slow_link.run([sys.executable, __file__, "rank"], 100, OMP_NUM_THREADS="1"))
    except UserError as error:
        print(f"benchmarks/swap.py is skipped: {error}")


if __name__ == "__main__":
    main()
