# %% [markdown]
# # 06 · Model and data parallel together
# **The question.** The model needs two GPUs. I have four, or two nodes with two each. How do
# all of them work?
#
# **Predict first.** (1) Two processes, each with a copy of the model on two GPUs: which GPUs
# communicate with each other, and when? (2) How much memory does each GPU need, compared with
# four copies of the model on one GPU each? (3) Which of the two is faster?

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
        "PT_CNN_HybridParallel",
        "Train a CNN with DDP; each rank has its copy on two GPUs.",
    )
    parser.add_argument(
        "--micro-batches",
        type=flags.positive,
        default=2,
        help="forward passes that a rank's part of the batch is split into (default: 2)",
    )
    parser.add_argument("--spawn", metavar="N", help="start N ranks on this machine")
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · The model, on two GPUs
# As in lesson 03, but the micro-batches are inside: the model takes a batch and returns its
# outputs. A rank is a **replica**; a replica consists of **stages**.


# %%
class Halves(CNN):
    """The CNN with its first `cut` layers on the GPU `first`, the others on `second`.

    The layers are conv1, conv2, fc1 and fc2; `cut` is 2 or 3.
    """

    def __init__(
        self,
        first: torch.device,
        second: torch.device,
        micro_batches: int,
        *args,
        cut: int = 2,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.first = first
        self.second = second
        self.micro_batches = micro_batches
        layers = [self.conv1, self.conv2, self.fc1, self.fc2]
        for layer in layers[:cut]:
            layer.to(first)
        for layer in layers[cut:]:
            layer.to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = []
        for micro_batch in images.chunk(self.micro_batches):
            x = torch.tanh(self.conv1(micro_batch))
            x = torch.tanh(self.conv2(x)).flatten(1)
            x = torch.tanh(self.fc1(x.to(self.fc1.weight.device)))
            outputs.append(self.fc2(x.to(self.second)))
        return torch.cat(outputs)


# %% [markdown]
# ## Step 2 · The ranks
# Each rank takes two GPUs: local rank 1 has `cuda:2` and `cuda:3`. `DDP` gets no `device_ids`:
# it takes each weight's device from the weight, and sums each gradient **with the same GPU of
# the other replicas**.


# %%
def set_up(args: argparse.Namespace) -> tuple[launch.World, list[torch.device]]:
    world = launch.find_world(gpus_each=2)
    gpus = multigpu.gpus(2, world)
    store = rendezvous.open_store(world, gpus[0])
    dist.init_process_group(
        devices.backend(gpus[0]),
        store=store,
        rank=world.rank,
        world_size=world.size,
    )
    return world, gpus


# %% [markdown]
# Prediction (1): one step of four virtual GPUs, in two processes. The shapes are lesson 03's,
# with 4,096 images for each replica. (`compute=False`: memory and time need only the shapes,
# not the numbers.)

# %% tags=["active-ipynb"]
# import sys
#
# from multigpu import plots, vgpu
#
# sys.path.insert(0, "../lessons/06-hybrid-parallel")
# from experiments import third_step
#
# WIDE = {"image_shape": (1, 28, 28), "hidden": 320}
#
#
# def simulate(stages, batch, link="NVLink2"):
#     """A rank's step: its seconds, the MiB on its GPUs before backward, and its timeline."""
#     gpus = vgpu.start(stages, link=link, compute=False)
#     dist.init_process_group("vgpu")
#     if stages == 2:
#         model = DDP(Halves(*gpus, 4, **WIDE))
#     else:
#         model = DDP(CNN(**WIDE).to(gpus[0]))
#     return third_step(model, gpus[0], gpus[-1], batch)
#
#
# hybrid = launch.call(simulate, 2, stages=2, batch=4096)  # in 2 processes
# whole = vgpu.Timeline.of_ranks([timeline for _, _, timeline in hybrid])
# whole.plot(title="Each GPU sums its gradients with the same GPU of the other replica")

# %% [markdown]
# The most common mistake:

# %% tags=["active-ipynb"]
# def mistake():
#     gpus = vgpu.start(2)
#     dist.init_process_group("vgpu")
#     try:
#         DDP(Halves(*gpus, 1), device_ids=[0])
#     except ValueError as error:
#         return str(error)
#
#
# print(launch.call(mistake, 1)[0])

# %% [markdown]
# ## Four GPUs: two replicas of two stages, or four replicas?
# Predictions (2) and (3): 8,192 images a step in both cases. The bars show the memory between
# forward and backward.

# %% tags=["active-ipynb"]
# ddp = launch.call(simulate, 4, stages=1, batch=2048)
# _, hybrid_memory, _ = hybrid[0]  # rank 0's two GPUs
# _, ddp_memory, _ = ddp[0]
# bars = {
#     "2 × 2, GPU 0": hybrid_memory[0],
#     "2 × 2, GPU 1": hybrid_memory[1],
#     "4 × 1, each GPU": ddp_memory[0],
# }
# title = "Stages divide the weights, replicas divide the images"
# plots.stacked_bars(bars, "MiB, metered on virtual GPUs", title)

# %% tags=["active-ipynb"]
# def compare(link, hybrid, ddp):
#     ratio = hybrid[0][0] / ddp[0][0]  # the seconds of rank 0
#     print(f"{link}: four replicas are {ratio:.1f} times as fast", end=" ")
#     print("as two replicas of two stages")
#
#
# compare("NVLink2", hybrid, ddp)
# slow_hybrid = launch.call(simulate, 2, stages=2, batch=4096, link="PCIe3")
# slow_ddp = launch.call(simulate, 4, stages=1, batch=2048, link="PCIe3")
# compare("PCIe3", slow_hybrid, slow_ddp)

# %% [markdown]
# Stages divide the weights, and nothing else: with fewer replicas, each takes more images.
# Data parallelism sends gradients, one number for each weight. Stages send activations, which
# grow with the batch, and they wait for each other. So: use as few stages as the memory
# allows, and replicas for the other GPUs.
#
# ## A model that does not fit, and a slow network
# The same CNN with 90,000 hidden units and 6,000 classes has 1.1 billion weights. With its
# gradient and Adam's two numbers, a weight takes 16 bytes, so a replica needs 16.5 GiB; a V100
# has 16. There are two nodes with two V100s each: NVLink inside, 10 Gb/s Ethernet between
# them. Predict: Should the two stages of a replica be on the same node? What does the second
# node gain?

# %% tags=["active-ipynb"]
# from experiments import layout_steps
#
# (replica, *_) = launch.call(layout_steps, 4, [("four replicas", "Ethernet10")])
# print(replica[0].error)

# %% tags=["active-ipynb"]
# def show(network, layout, step):
#     speed = step.images / step.seconds
#     memory = " and ".join(f"{peak:.1f}" for peak in step.peak)
#     print(f"{network:<11} {layout:<23} {speed:5.0f} images/s, {memory} GiB")
#
#
# ((one,),) = launch.call(layout_steps, 1, [("one pipeline, one node", "Ethernet10")])
# show("", "one pipeline, one node", one)
# layouts = ("stages inside nodes", "stages across nodes")
# cases = [(layout, net) for net in ("Ethernet10", "HDR200") for layout in layouts]
# steps, _ = launch.call(layout_steps, 2, cases)
# for (layout, network), step in zip(cases, steps):
#     show(network, layout, step)

# %% [markdown]
# Two stages fit. Stages on different nodes send 5.9 GB between the nodes in a step: 8,192
# images × 90,000 numbers × 4 bytes, forward and backward. Replicas on different nodes send 4.4
# GB of gradients. So a replica's stages belong on one node. And with 10 Gb/s Ethernet even
# that makes two nodes slower than one: they pay with a faster network only. Count the bytes
# that cross the slow link: they decide the layout.
#
# ## Step 3 · Train and evaluate
# As in lesson 05, but images go to the first GPU of the rank, and labels to its second.


# %%
def train_epoch(
    model: DDP,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    batch: data.Batch,
    world: launch.World,
) -> float:
    """Train for one epoch. Returns the mean loss over all images of all ranks."""
    halves = model.module
    images_in_all = len(loader.dataset)
    total = torch.zeros((), dtype=torch.float64, device=halves.second)
    for step, (images, labels) in enumerate(metrics.progress(loader, world)):
        # The sampler repeats images to make all shards equal in size: a repeat gets weight 0.
        index = step * batch.micro_batches  # the step's first micro-batch
        real = data.real_rows(images_in_all, batch, world.rank, index, len(labels))
        outputs = model(images.to(halves.first))
        losses = F.cross_entropy(outputs, labels.to(halves.second), reduction="none")
        loss = (losses * real.to(halves.second)).sum()

        # DDP averages over ranks; the mean over images is wanted.
        optimizer.zero_grad()
        (loss * world.size / batch.images_in_step(step, images_in_all)).backward()
        optimizer.step()
        total += loss.detach()

    dist.all_reduce(total)
    return total.item() / images_in_all


@torch.no_grad()
def accuracy(model: Halves, test: TensorDataset, world: launch.World) -> float:
    """The accuracy on the whole test set, the same number on every rank."""
    shard = Subset(test, range(world.rank, len(test), world.size))
    hits = torch.zeros((), dtype=torch.float64, device=model.second)
    for images, labels in DataLoader(shard, batch_size=256):
        predictions = model(images.to(model.first)).argmax(1)
        hits += (predictions == labels.to(model.second)).sum()
    dist.all_reduce(hits)
    return hits.item() / len(test)


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    world, gpus = set_up(args)
    serial_device = devices.serial_device(gpus, exact=args.prove)
    with rendezvous.fail_together(world):
        batch = flags.split_batch(args.batch_size, world.size, args.micro_batches)
        if world.rank == 0:
            files.writable_folder(args.out)
        if world.local_rank == 0:  # one download for each node
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        train, test = data.load(data.fetch(args.data))
    rendezvous.same_everywhere(world, "the training data", data.checksum(train))

    def new_model(kind: type[CNN], *placement: object) -> CNN:
        torch.manual_seed(args.seed)
        return kind(*placement, tuple(train[0][0].shape), data.num_classes(train, test))

    model = DDP(new_model(Halves, *gpus, batch.micro_batches))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    sampler = DistributedSampler(train, world.size, world.rank, seed=args.seed)
    images_per_rank = batch.micro_batches * batch.per_micro_batch
    if world.rank == 0:
        print(devices.describe(world, gpus[0], each=2))
        print(f"{pluralize(world.size, 'replica')} of 2 stages")
        per_rank = f"{batch.micro_batches} (micro-batches) × {batch.per_micro_batch} (images)"
        print(f"global batch {batch.global_size} = {world.size} (replicas) × {per_rank}\n")
        print(metrics.header(), flush=True)

    history = []
    for epoch in range(args.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        loader = DataLoader(train, images_per_rank, sampler=sampler)
        loss = train_epoch(model, optimizer, loader, batch, world)
        metrics.check_loss(loss, epoch, world)
        images_per_s = len(train) / (time.perf_counter() - began)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": accuracy(model.module, test, world),
            "images_per_s": images_per_s,
        }
        history.append(row)
        if world.rank == 0:
            print(metrics.row(row), flush=True)
    dist.destroy_process_group()

    if world.rank == 0:
        weights = {name: weight.cpu() for name, weight in model.module.state_dict().items()}
        with files.atomic(args.out / "model.pt") as temporary:
            torch.save(weights, temporary)
        verdict = None
        if args.prove:
            claim = f"{pluralize(world.size, 'replica')} × 2 stages equals one process"
            fresh = new_model(CNN).to(serial_device)
            verdict = proof.compare_with_serial(
                claim, model.module, fresh, train, args, batch_size=batch.global_size
            )
        metrics.report(
            args.out,
            world,
            gpus[0],
            history,
            verdict,
            devices=2 * world.size,
            batch_size=batch.global_size,
        )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# Two ranks, four GPUs. On two nodes of a cluster: `sbatch slurm/PT_CNN_HybridParallel.slurm`.

# %% tags=["active-ipynb"]
# torchrun = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
# !OMP_NUM_THREADS=1 {torchrun} ../scripts/PT_CNN_HybridParallel.py --prove --out results/06

# %% tags=["active-ipynb"]
# print(metrics.route_row("06 model and data parallel", "results/06"))

# %% [markdown] tags=["footer"]
# [← 05 DDP on a cluster](PT_CNN_MultiGPU.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/06-hybrid-parallel/README.md) ·
# [07 MirroredStrategy →](TF_CNN_MultiGPU.ipynb)
