# %% [markdown]
# # 06 · Model and data parallel together
# **The question.** The model wants two GPUs. I have four, or two nodes with two each. How do all of them work?
#
# **Predict first.** (1) Two processes, each with a copy of the model on two GPUs: which GPUs talk to each other, and when?
# (2) How much memory does each GPU need, beside four copies of the model on a GPU each? (3) Which of the two is faster?

# %%
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import multigpu
from multigpu import data, devices, files, flags, launch, metrics, proof, rendezvous
from multigpu.errors import pluralize
from multigpu.models import CNN

# %% [markdown]
# ## Step 0 · The flags


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_HybridParallel", "Train a CNN with DDP; each rank has its copy on two GPUs."
    )
    parser.add_argument(
        "--pieces",
        type=flags.positive,
        default=2,
        help="micro-batches of a rank's share (default: 2)",
    )
    parser.add_argument("--spawn", metavar="N", help="start N ranks on this machine")
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · The model, on two GPUs
# As in lesson 03, but the pieces are inside: whoever calls the model sees a batch go in and outputs come out. A rank is a
# **replica**; inside it there are **stages**.


# %%
class Halves(CNN):
    def __init__(
        self, first: torch.device, second: torch.device, pieces: int, *args, **kwargs
    ):
        super().__init__(*args, **kwargs)
        self.first, self.second, self.pieces = first, second, pieces
        self.conv1.to(first), self.conv2.to(first)
        self.fc1.to(second), self.fc2.to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = []
        for piece in images.chunk(self.pieces):
            x = torch.tanh(self.conv2(torch.tanh(self.conv1(piece)))).to(self.second)
            outputs.append(self.fc2(torch.tanh(self.fc1(x.flatten(1)))))
        return torch.cat(outputs)


# %% [markdown]
# ## Step 2 · The ranks
# Each rank takes two GPUs: local rank 1 has `cuda:2` and `cuda:3`. `DDP` is told no `device_ids`: it sees on which devices
# the weights are, and it sums each gradient **with the same GPU of the other replicas**.


# %%
def set_up(args: argparse.Namespace) -> tuple[launch.World, list[torch.device]]:
    world = launch.find(gpus_each=2)
    places = multigpu.gpus(2, world)
    store = rendezvous.meet(world, places[0])
    dist.init_process_group(
        devices.backend(places[0]), store=store, rank=world.rank, world_size=world.size
    )
    return world, places


# %% [markdown]
# Prediction (1): one step of four virtual GPUs, in two processes. The shapes are lesson 03's, with 4,096 images for each
# replica. (`compute=False`: shapes without numbers are enough for memory and time.)

# %% tags=["active-ipynb"]
# from multigpu import plots, vgpu
# wide = {"image_shape": (1, 28, 28), "hidden": 320}
#
#
# def simulate(stages, batch, link="NVLink2"):
#     """A rank's step: its seconds, what its GPUs hold before backward, in MiB, and their timeline."""
#     places = vgpu.start(stages, link=link, compute=False)
#     dist.init_process_group("vgpu")
#     model = DDP(Halves(*places, 4, **wide) if stages == 2 else CNN(**wide).to(places[0]))
#     optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
#     images = torch.empty(batch, 1, 28, 28, device=places[0])
#     labels = torch.empty(batch, dtype=torch.long, device=places[-1])
#     for _ in range(3):
#         began = vgpu.elapsed()
#         optimizer.zero_grad(set_to_none=False)  # zeros, not nothing: so the bars below show the gradients
#         loss = F.cross_entropy(model(images), labels)
#         held = vgpu.memory_held(model, optimizer)
#         loss.backward()
#         optimizer.step()
#     held = [{part: size / 2**20 for part, size in parts.items()} for parts in held.values()]
#     return vgpu.elapsed() - began, held, vgpu.timeline(since=began)
#
#
# hybrid = launch.call(simulate, 2, stages=2, batch=4096)  # in 2 processes
# whole = vgpu.Timeline.of_ranks([timeline for *_, timeline in hybrid])
# whole.plot(title="Each GPU sums its gradients with its twin, the same GPU of the other replica")

# %% [markdown]
# The mistake that everyone makes first:

# %% tags=["active-ipynb"]
# def mistake():
#     places = vgpu.start(2)
#     dist.init_process_group("vgpu")
#     try:
#         DDP(Halves(*places, 1), device_ids=[0])
#     except ValueError as error:
#         return str(error)
#
#
# print(launch.call(mistake, 1)[0])

# %% [markdown]
# ## Four GPUs: two replicas of two stages, or four replicas?
# Predictions (2) and (3): 8,192 images a step either way. The bars show the moment between forward and backward.

# %% tags=["active-ipynb"]
# ddp = launch.call(simulate, 4, stages=1, batch=2048)
# bars = {"2 × 2, GPU 0": hybrid[0][1][0], "2 × 2, GPU 1": hybrid[0][1][1], "4 × 1, each GPU": ddp[0][1][0]}
# plots.stacked(bars, "MiB, metered on virtual GPUs", "Stages spread the weights, replicas spread the images")

# %% tags=["active-ipynb"]
# slow = [launch.call(simulate, n, stages=4 // n, batch=8192 // n, link="PCIe3") for n in (2, 4)]
# for link, two, four in (("NVLink2", hybrid, ddp), ("PCIe3", *slow)):
#     print(f"{link}: four replicas are {two[0][0] / four[0][0]:.1f} times as fast as two replicas of two stages")

# %% [markdown]
# Stages spread the weights, and only them: with fewer replicas, each takes more images. Data parallelism sends gradients, as
# many as there are weights; stages send activations, which grow with the batch, and they wait for each other. So: as few
# stages as the memory allows, and replicas with all that is left.
#
# ## Step 3 · Train and evaluate
# As in lesson 05. Only the places differ: images go to the first GPU of the rank, labels to its second.


# %%
def train_epoch(model: DDP, optimizer, loader: DataLoader, world: launch.World) -> float:
    """One epoch. Returns the mean loss over all images of all ranks."""
    first, second, share, images_in_all = (
        model.module.first,
        model.module.second,
        loader.batch_size,
        len(loader.dataset),
    )
    total = torch.zeros((), dtype=torch.float64, device=second)
    for i, (images, labels) in enumerate(metrics.progress(loader, world)):
        # DDP averages over ranks, we want the mean over images; the sampler's repeated images have weight 0
        batch = min(world.size * share, images_in_all - i * world.size * share)
        real = (
            i * share + torch.arange(len(labels))
        ) * world.size + world.rank < images_in_all
        losses = F.cross_entropy(model(images.to(first)), labels.to(second), reduction="none")
        loss = (losses * real.to(second)).sum()
        optimizer.zero_grad()
        (loss * world.size / batch).backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / images_in_all


@torch.no_grad()
def accuracy(model: Halves, test: TensorDataset, world: launch.World) -> float:
    hits = torch.zeros((), dtype=torch.float64, device=model.second)
    for images, labels in DataLoader(
        Subset(test, range(world.rank, len(test), world.size)), batch_size=256
    ):
        hits += (model(images.to(model.first)).argmax(1) == labels.to(model.second)).sum()
    dist.all_reduce(hits)
    return hits.item() / len(test)


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    world, places = set_up(args)
    home = devices.home(places, exact=args.prove)  # where the serial run computes
    with rendezvous.fail_together(world):
        args.batch_size, piece = flags.split(args.batch_size, world.size, args.pieces)
        if world.rank == 0:
            files.writable_folder(args.out)
        if world.local_rank == 0:
            data.fetch(args.data)  # one rank a node fetches …
    with rendezvous.fail_together(world):
        train, test = data.load(data.fetch(args.data))  # … and the others find it there
    rendezvous.same_everywhere(world, "the training data", data.checksum(train))

    def new_model(kind: type[CNN], *where: object) -> CNN:
        torch.manual_seed(args.seed)
        return kind(*where, tuple(train[0][0].shape), data.classes(train, test))

    model = DDP(new_model(Halves, *places, args.pieces))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    sampler = DistributedSampler(train, world.size, world.rank, seed=args.seed)
    say, history = print if world.rank == 0 else lambda *_, **__: None, []
    say(devices.describe(world, places[0], each=2))
    split = f"global batch {args.batch_size} = {world.size} (replicas) × {args.pieces} (pieces) × {piece} (images)"
    say(
        f"{pluralize(world.size, 'replica')} of 2 stages; {split}\n\n{metrics.header()}",
        flush=True,
    )
    for epoch in range(args.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        loss = train_epoch(
            model, optimizer, DataLoader(train, args.pieces * piece, sampler=sampler), world
        )
        metrics.finite(loss, epoch, world)
        speed = len(train) / (time.perf_counter() - began)
        right = accuracy(model.module, test, world)
        history.append(
            {"epoch": epoch + 1, "loss": loss, "test_accuracy": right, "images_per_s": speed}
        )
        say(metrics.row(history[-1]), flush=True)
    dist.destroy_process_group()
    if world.rank == 0:
        with files.atomic(args.out / "model.pt") as temporary:
            torch.save(
                {name: weight.cpu() for name, weight in model.module.state_dict().items()},
                temporary,
            )
        what, all_gpus = (
            f"DDP of {pluralize(world.size, 'replica')} of 2 stages equals one process",
            2 * world.size,
        )
        verdict = (
            proof.against_serial(what, model.module, new_model(CNN).to(home), train, args)
            if args.prove
            else None
        )
        metrics.report(
            args.out,
            world,
            places[0],
            history,
            verdict,
            devices=all_gpus,
            batch_size=args.batch_size,
        )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# Two ranks, four GPUs. On two nodes of a cluster: `sbatch slurm/PT_CNN_HybridParallel.slurm`.

# %% tags=["active-ipynb"]
# torchrun = "OMP_NUM_THREADS=1 torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
# !{torchrun} ../scripts/PT_CNN_HybridParallel.py --prove --out results/06

# %% tags=["active-ipynb"]
# print(metrics.line("06 model and data parallel", "results/06"))
