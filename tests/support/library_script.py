"""A script on the course's library, by which its launcher, data and messages are tested.

It trains the CNN for an epoch with DDP, under any launcher, and writes metrics.json.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from multigpu import data, devices, files, launch
from multigpu.launch import rendezvous
from multigpu.models import CNN


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a CNN with DDP.")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("results/library_script"))
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    world = launch.find_world()
    device = devices.pick(world)
    store = rendezvous.open_store(world, device)
    backend = devices.backend(device)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    with rendezvous.fail_together(world):
        if world.rank == 0:
            files.writable_folder(args.out)
    with rendezvous.fail_together(world):
        if world.local_rank == 0:
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        train, test = data.load(data.fetch(args.data))
    model = DDP(CNN(tuple(train[0][0].shape), data.num_classes(train, test)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for images, labels in DataLoader(train, 8, sampler=DistributedSampler(train)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    if world.rank == 0:
        run = {"world_size": world.size, "loss": loss.item()}
        files.write_json(args.out / "metrics.json", run)
        print("trained", flush=True)


if __name__ == "__main__":
    launch.start(main, parse())
