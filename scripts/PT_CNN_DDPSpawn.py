# %% [markdown]
# # 04 · DDP with mp.spawn
# **The question.** torchrun is started from a terminal. Can a script, or a notebook, start its
# own ranks?
#
# **Predict first.** (1) Ranks that a program spawns train `model`. What does the program's own
# `model` hold afterwards? (2) Nobody sets a seed, and each rank makes its own model. What does
# `DDP` do about it? (3) A function that is defined in a cell is passed to `mp.spawn`. What
# happens, and why?

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
        "PT_CNN_DDPSpawn",
        "Train a CNN with DDP on processes that this program starts itself.",
    )
    parser.add_argument(
        "--nprocs",
        type=flags.positive,
        default=torch.cuda.device_count() or 2,
        help="processes to start, one a GPU (default: as many as there are GPUs, or 2)",
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · What each rank does
# `mp.spawn` calls this function in each new process, with the rank as its first argument. A
# new process has nothing of its parent but the arguments, which were pickled: it sets up its
# rank, its device, its model and its data itself.


# %%
def train(
    rank: int,
    batch: data.Batch,
    port: int,
    args: argparse.Namespace,
    result: str,
) -> None:
    """Train as rank `rank`. Rank 0 writes the weights and the history to the file `result`."""
    ranks = batch.ranks
    world = launch.World(rank, ranks, rank, ranks, launcher="mp.spawn")
    device = devices.pick(world, exact=args.prove)  # cuda:RANK, or the CPU
    # The parent holds the store, so no other program can take the port.
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(devices.backend(device), store=store, rank=rank, world_size=ranks)

    train_set, test = data.load(data.fetch(args.data))
    sampler = DistributedSampler(train_set, ranks, rank, seed=args.seed)  # this rank's shard
    # The same weights on all ranks. Without a seed DDP would copy rank 0's to the others.
    torch.manual_seed(args.seed)
    model = DDP(
        new_model(train_set, test, device),
        device_ids=[device.index] if device.type == "cuda" else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    history = []
    if rank == 0:
        print(devices.describe(world, device), end="\n\n")
        print(metrics.header(), flush=True)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        loader = DataLoader(train_set, batch.per_micro_batch, sampler=sampler)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for step, (images, labels) in enumerate(loader):
            images = images.to(device)
            labels = labels.to(device)

            # The sampler repeats images until all shards are equal in size: a repeat gets
            # weight 0. DDP averages over ranks; the mean over images is wanted. See lesson 05.
            real = data.real_rows(len(train_set), batch, rank, step, len(labels), device)
            losses = F.cross_entropy(model(images), labels, reduction="none")
            loss = (losses * real).sum()

            optimizer.zero_grad()
            (loss * ranks / batch.images_in_step(step, len(train_set))).backward()
            optimizer.step()
            total += loss.detach()

        dist.all_reduce(total)
        images_per_s = len(train_set) / (time.perf_counter() - began)
        row = {
            "epoch": epoch + 1,
            "loss": metrics.check_loss(total.item() / len(train_set), epoch, world),
            "test_accuracy": accuracy(model.module, test),
            "images_per_s": images_per_s,
        }
        history.append(row)
        if rank == 0:
            print(metrics.row(row), flush=True)

    # A spawned function returns nothing to its parent: write the results to a file.
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "history": history}, result)
    # First DDP, then its group: DDP can hang if it drops the last reference to the group.
    del model
    dist.destroy_process_group()


def new_model(
    train_set: TensorDataset, test: TensorDataset, device: torch.device
) -> torch.nn.Module:
    return CNN(tuple(train_set[0][0].shape), data.num_classes(train_set, test)).to(device)


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: TensorDataset) -> float:
    """The accuracy on the whole test set."""
    device = next(model.parameters()).device
    images, labels = test.tensors
    predictions = model(images.to(device)).argmax(1).cpu()
    return (predictions == labels).double().mean().item()


# %% [markdown]
# ## Step 2 · Start the ranks
# The parent does not train. It checks the flags and fetches the data once, before any rank
# starts. It holds the store through which the ranks find each other, spawns them, and reads
# the file that rank 0 wrote. The file gets its name only if all ranks succeeded.


# %%
def main(args: argparse.Namespace) -> None:
    launch.single_process_world("PT_CNN_DDPSpawn")
    launch.check_room(args.nprocs)
    batch = flags.split_batch(args.batch_size, args.nprocs)
    train_set, test = data.load(data.fetch(args.data))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with files.atomic(files.writable_folder(args.out) / "model.pt") as result:
        mp.spawn(train, args=(batch, store.port, args, str(result)), nprocs=args.nprocs)
        trained = torch.load(result, weights_only=True)

    device = devices.pick(launch.World())
    model = new_model(train_set, test, device)
    model.load_state_dict(trained["model"])
    verdict = None
    if args.prove:
        claim = f"DDP on {args.nprocs} spawned ranks equals one process"
        torch.manual_seed(args.seed)
        fresh = new_model(train_set, test, device)
        verdict = proof.compare_with_serial(
            claim, model, fresh, train_set, args, batch_size=batch.global_size
        )
    world = launch.World(0, args.nprocs, 0, args.nprocs, launcher="mp.spawn")
    metrics.report(
        args.out,
        world,
        device,
        trained["history"],
        verdict,
        batch_size=batch.global_size,
    )


# %% [markdown]
# ## A function of a cell cannot be spawned
# A new process does not have the notebook's functions. Pickle writes a function as two names,
# its module's and its own, and the new process must find it under these names:

# %% tags=["active-ipynb"]
# import pickle
# import threading
#
# import cloudpickle
#
#
# def hello():
#     return f"rank {launch.find_world().rank} of {launch.find_world().size}"
#
#
# names = pickle.dumps(hello)
# print(names)
# !python -c "import pickle; pickle.loads({names})" 2>&1 | tail -n 1

# %% [markdown]
# `launch.call` sends the function itself (its code and the variables that it uses, by
# cloudpickle) and returns what the ranks return:

# %% tags=["active-ipynb"]
# launch.call(hello, 2)

# %% [markdown]
# Which objects can be sent to a process at all?

# %% tags=["active-ipynb"]
# things = {
#     "a tensor": torch.ones(2),
#     "a lambda": lambda: 1,
#     "a lock": threading.Lock(),
#     "a generator": iter(letter for letter in "ab"),
# }
# for name, thing in things.items():
#     for pickler in (pickle, cloudpickle):
#         try:
#             pickler.dumps(thing)
#             print(f"{name}, {pickler.__name__}: yes")
#         except (TypeError, AttributeError, pickle.PicklingError):
#             print(f"{name}, {pickler.__name__}: no")

# %% [markdown]
# ## Whose model is it?
# Prediction (1). A process has its own memory, so the parent's model stays as it was. Or does
# it?

# %% tags=["active-ipynb"]
# weights = torch.ones(3)
# launch.call(torch.nn.init.zeros_, 2, weights)
# print("sent by value:            ", weights)
# launch.spawn(torch.nn.init.zeros_, 2, weights)
# print("an argument of mp.spawn:  ", weights)

# %% [markdown]
# torch passes a tensor to a process by **sharing its memory**. Ranks that train a model from
# their arguments all write into the same weights, at the same time. So each rank makes its own
# model, and the result comes back in a file.
#
# ## Which weights does each rank start with?
# Prediction (2). Without a seed, each process takes one from the operating system. Here the
# rank is the seed, so that the result is always the same. Five steps, with gradients averaged
# by DDP or by hand: how large is the difference between the ranks' weights then?

# %% tags=["active-ipynb"]
# def trained(same_seed, by_ddp):
#     dist.init_process_group("gloo")
#     torch.manual_seed(0 if same_seed else dist.get_rank())
#     model = torch.nn.Linear(4, 1)
#     wrapped = DDP(model) if by_ddp else model
#     for _ in range(5):
#         model.zero_grad()
#         wrapped(torch.randn(8, 4)).square().mean().backward()
#         for weight in model.parameters():
#             if not by_ddp:
#                 dist.all_reduce(weight.grad, dist.ReduceOp.SUM)
#                 weight.grad /= dist.get_world_size()
#             weight.data -= 0.1 * weight.grad
#     return model.weight.detach()
#
#
# for same_seed in (True, False):
#     for by_ddp in (True, False):
#         first, second = launch.call(trained, 2, same_seed, by_ddp)
#         seeds = "one seed for all" if same_seed else "a seed a rank"
#         how = "by DDP" if by_ddp else "by hand"
#         difference = (first - second).abs().max().item()
#         print(f"{seeds}, averaged {how}: {difference:.2f} apart")

# %% [markdown]
# DDP copies rank 0's weights to all ranks when it wraps the model, so a forgotten seed does no
# harm to the weights. By hand, the same gradients are subtracted from different weights: the
# difference stays as large as it was at the start.
#
# And each rank sees only its shard of the 1,437 images:

# %% tags=["active-ipynb"]
# def shard():
#     world = launch.find_world()
#     return list(DistributedSampler(range(1437), world.size, world.rank))
#
#
# first, second = launch.call(shard, 2)
# in_both = set(first) & set(second)
# print(f"{len(first)} and {len(second)} images, {len(in_both)} in both:", end=" ")
# print("the sampler makes the shards equal in size")

# %% [markdown]
# A spawned process imports this file again. Without the following `if` it would spawn ranks,
# too.

# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# One line starts the whole run. On a cluster, `srun` and `torchrun` do more: they start ranks
# on many nodes.

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_DDPSpawn.py --prove --out results/04

# %% tags=["active-ipynb"]
# print(metrics.route_row("04 DDP by mp.spawn", "results/04"))  # for the table of all routes

# %% [markdown] tags=["footer"]
# [← 03 Pipeline](PT_CNN_Pipeline.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/04-ddp-spawn/README.md) ·
# [05 DDP on a cluster →](PT_CNN_MultiGPU.ipynb)
