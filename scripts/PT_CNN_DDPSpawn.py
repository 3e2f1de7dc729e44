# %% [markdown]
# # 04 · DDP with mp.spawn
# **The question.** torchrun wants a terminal. Can a script, or a notebook, start its own ranks?
#
# **Predict first.** (1) Ranks that a program spawns train `model`. What does the program's own `model` hold afterwards?
# (2) Nobody sets a seed, and each rank makes its model: what does `DDP` do about it? (3) A function that is defined in a
# cell is given to `mp.spawn`: what happens, and why?

# %%
import argparse
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.models import CNN

# %% [markdown]
# ## Step 0 · The flags


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_DDPSpawn", "Train a CNN with DDP on processes that this program starts itself."
    )
    help_ = "processes to start, one a GPU (default: as many as there are GPUs, or 2)"
    parser.add_argument(
        "--nprocs", type=flags.positive, default=torch.cuda.device_count() or 2, help=help_
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · What each rank does
# `mp.spawn` calls this function in each new process, with the rank as its first argument. A process starts empty: it sets
# up its rank, its device, its model and its data itself. Only what is pickled into `args` comes from the parent.


# %%
def train(rank: int, nprocs: int, port: int, args: argparse.Namespace, result: str) -> None:
    world = launch.World(rank, nprocs, rank, nprocs, launcher="mp.spawn")
    device = devices.pick(world, exact=args.prove)  # cuda:RANK, or the CPU
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False
    )  # the parent holds it, so the port cannot be taken
    dist.init_process_group(devices.backend(device), store=store, rank=rank, world_size=nprocs)

    train_set, test = data.load(data.fetch(args.data))
    torch.manual_seed(args.seed)  # the same weights on all ranks; DDP would see to it, too
    model = DDP(
        new_model(train_set, test, device),
        device_ids=[device.index] if device.type == "cuda" else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    sampler = DistributedSampler(
        train_set, nprocs, rank, seed=args.seed
    )  # each rank sees its part only
    share = args.batch_size // nprocs
    history = []
    if rank == 0:
        print(devices.describe(world, device), end="\n\n")
        print(metrics.header(), flush=True)
    for epoch in range(args.epochs):
        began, total = time.perf_counter(), torch.zeros((), dtype=torch.float64, device=device)
        sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(DataLoader(train_set, share, sampler=sampler)):
            images, labels = images.to(device), labels.to(device)
            # The sampler repeats some images to come out even: they get weight 0. DDP averages over ranks, we want the
            # mean over images. Lesson 05 explains both.
            batch = min(args.batch_size, len(train_set) - i * args.batch_size)
            real = (
                i * share + torch.arange(len(labels), device=device)
            ) * nprocs + rank < len(train_set)
            loss = (F.cross_entropy(model(images), labels, reduction="none") * real).sum()
            optimizer.zero_grad()
            (loss * nprocs / batch).backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        speed = len(train_set) / (time.perf_counter() - began)
        loss = metrics.finite(total.item() / len(train_set), epoch, world)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": accuracy(model.module, test),
            "images_per_s": speed,
        }
        history.append(row)
        if rank == 0:
            print(metrics.row(row), flush=True)

    if (
        rank == 0
    ):  # a spawned function returns nothing to its parent: what shall last goes to a file
        torch.save({"model": model.module.state_dict(), "history": history}, result)
    dist.destroy_process_group()


def new_model(
    train_set: TensorDataset, test: TensorDataset, device: torch.device
) -> torch.nn.Module:
    return CNN(tuple(train_set[0][0].shape), data.classes(train_set, test)).to(device)


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: TensorDataset) -> float:
    device = next(model.parameters()).device
    return (
        (model(test.tensors[0].to(device)).argmax(1).cpu() == test.tensors[1])
        .double()
        .mean()
        .item()
    )


# %% [markdown]
# ## Step 2 · Start the ranks
# The parent trains nothing. It checks the flags and fetches the data, once, before anybody starts; holds the store where
# the ranks meet; spawns; and reads the file that rank 0 has left. The file appears under its name only if all went well.


# %%
def main(args: argparse.Namespace) -> None:
    launch.alone("PT_CNN_DDPSpawn")
    args.batch_size, _ = flags.split(args.batch_size, args.nprocs)
    train_set, test = data.load(data.fetch(args.data))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with files.atomic(files.writable_folder(args.out) / "model.pt") as result:
        mp.spawn(train, args=(args.nprocs, store.port, args, str(result)), nprocs=args.nprocs)
        trained = torch.load(result, weights_only=True)

    world = launch.World(0, args.nprocs, 0, args.nprocs, launcher="mp.spawn")
    device = devices.pick(launch.World())
    torch.manual_seed(args.seed)
    fresh, model = new_model(train_set, test, device), new_model(train_set, test, device)
    model.load_state_dict(trained["model"])
    what = f"DDP on {args.nprocs} spawned processes equals one process"
    verdict = proof.against_serial(what, model, fresh, train_set, args) if args.prove else None
    metrics.report(
        args.out, world, device, trained["history"], verdict, batch_size=args.batch_size
    )


# %% [markdown]
# ## A function of a cell cannot be spawned
# A new process has no notebook. A function is pickled as two names, its module's and its own, and looked up over there:

# %% tags=["active-ipynb"]
# import pickle
# import threading
#
# import cloudpickle
#
#
# def hello():
#     return f"rank {launch.find().rank} of {launch.find().size}"
#
#
# names = pickle.dumps(hello)
# print(names)
# !python -c "import pickle; pickle.loads({names})" 2>&1 | tail -n 1

# %% [markdown]
# `launch.call` sends the function itself (its code and what it uses, by cloudpickle) and brings back what the ranks return:

# %% tags=["active-ipynb"]
# launch.call(hello, 2)

# %% [markdown]
# What can be handed to a process at all?

# %% tags=["active-ipynb"]
# things = {"a tensor": torch.ones(2), "a lambda": lambda: 1, "a lock": threading.Lock(), "a generator": iter(i for i in "ab")}
# for name, thing in things.items():
#     for pickler in (pickle, cloudpickle):
#         try:
#             pickler.dumps(thing)
#             print(f"{name}, {pickler.__name__}: yes")
#         except (TypeError, AttributeError, pickle.PicklingError):
#             print(f"{name}, {pickler.__name__}: no")

# %% [markdown]
# ## Whose model is it?
# Prediction (1). A process has its own memory, so the parent's model stays as it was. Or does it?

# %% tags=["active-ipynb"]
# weights = torch.ones(3)
# launch.call(torch.nn.init.zeros_, 2, weights)
# print("sent by value:            ", weights)
# launch.spawn(torch.nn.init.zeros_, 2, weights)
# print("an argument of mp.spawn:  ", weights)

# %% [markdown]
# torch hands a tensor to a process by **sharing its memory**. Ranks that train a model which they were handed write into one
# and the same weights, all at once. So each rank makes its own, and the result comes home in a file.
#
# ## Who starts where?
# Prediction (2). Without a seed, each process draws one from the system. Here the rank is the seed, so that the outcome is
# always the same. Five steps, with gradients averaged by DDP or by hand: how far apart are the ranks' weights then?

# %% tags=["active-ipynb"]
# def trained(one_seed, by_ddp):
#     dist.init_process_group("gloo")
#     torch.manual_seed(0 if one_seed else dist.get_rank())
#     model = torch.nn.Linear(4, 1)
#     wrapped = DDP(model) if by_ddp else model
#     for _ in range(5):
#         model.zero_grad()
#         wrapped(torch.randn(8, 4)).square().mean().backward()
#         for p in model.parameters():
#             if not by_ddp:
#                 dist.all_reduce(p.grad, dist.ReduceOp.SUM)
#                 p.grad /= dist.get_world_size()
#             p.data -= 0.1 * p.grad
#     return model.weight.detach()
#
#
# for one_seed in (True, False):
#     for by_ddp in (True, False):
#         mine, other = launch.call(trained, 2, one_seed, by_ddp)
#         told = f"{'one seed for all' if one_seed else 'a seed a rank'}, averaged {'by DDP' if by_ddp else 'by hand'}"
#         print(f"{told}: {(mine - other).abs().max().item():.2f} apart")

# %% [markdown]
# DDP copies rank 0's weights to all ranks when it wraps the model, so a forgotten seed does no harm to the weights. By hand,
# the same gradients are subtracted from different weights: the ranks stay apart by what they were apart at the start.
#
# And each rank sees its part of the 1,437 images only:

# %% tags=["active-ipynb"]
# def part():
#     return list(DistributedSampler(range(1437), launch.find().size, launch.find().rank))
#
#
# mine, other = launch.call(part, 2)
# print(f"{len(mine)} and {len(other)} images, {len({*mine} & {*other})} in both: the sampler makes the parts even")

# %% tags=["active-py"]
if (
    __name__ == "__main__"
):  # a spawned process imports this file again: without this line it would spawn, too
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# The whole run starts from one line. On a cluster `srun` and `torchrun` do better: they start ranks on many nodes.

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_DDPSpawn.py --prove --out results/04

# %% tags=["active-ipynb"]
# print(metrics.line("04 DDP by mp.spawn", "results/04"))  # so that routes can be compared
