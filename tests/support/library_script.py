"""A script on the course's library, by which its launchers, flags and messages are tested.

It trains the CNN with DDP, under any launcher or with --spawn.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from multigpu import data, devices, files, flags, launch, metrics, proof, rendezvous
from multigpu.models import CNN


def parse() -> argparse.Namespace:
    parser = flags.parser("LibraryScript", "Train a CNN with DDP.")
    parser.add_argument("--spawn", metavar="N")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    world = launch.find_world()
    device = devices.pick(world, exact=args.prove)
    store = rendezvous.open_store(world, device)
    backend = devices.backend(device)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    with rendezvous.fail_together(world):
        batch = flags.split_batch(args.batch_size, world.size)
        if world.rank == 0:
            files.writable_folder(args.out)
    with rendezvous.fail_together(world):
        if world.local_rank == 0:
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        train, test = data.load(data.fetch(args.data))
    if world.rank == 0:
        print(f"{devices.describe(world, device)}\n\n{metrics.header()}", flush=True)

    def new_model() -> torch.nn.Module:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.num_classes(train, test)).to(device)

    model = new_model()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    sampler = DistributedSampler(train, world.size, world.rank, seed=args.seed)
    size = batch.per_micro_batch
    history = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        began, total = time.perf_counter(), torch.zeros((), device=device)
        loader = metrics.progress(DataLoader(train, size, sampler=sampler), world)
        for step, (images, labels) in enumerate(loader):
            real = data.real_rows(len(train), batch, world.rank, step, len(labels), device)
            logits = ddp(images.to(device))
            losses = F.cross_entropy(logits, labels.to(device), reduction="none") * real
            optimizer.zero_grad()
            in_step = batch.images_in_step(step, len(train))
            (losses.sum() * world.size / in_step).backward()
            optimizer.step()
            total += losses.detach().sum()
        dist.all_reduce(total)
        loss = metrics.check_loss(total.item() / len(train), epoch, world)
        speed = len(train) / (time.perf_counter() - began)
        row = {"loss": loss, "test_accuracy": 0.0, "images_per_s": speed}
        history.append({"epoch": epoch + 1, **row})
        if world.rank == 0:
            print(metrics.row(history[-1]), flush=True)
    dist.destroy_process_group()
    if world.rank == 0:
        verdict = None
        if args.prove:
            claim, new = f"DDP on {world.size} ranks equals one process", new_model()
            same = {"batch_size": batch.global_size, "epochs": args.epochs}
            verdict = proof.compare_with_serial(claim, model, new, train, args, **same)
        metrics.report(args.out, world, device, history, verdict)


if __name__ == "__main__":
    launch.start(main, parse())
