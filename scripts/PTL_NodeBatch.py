# %% [markdown]
# # 10 continued · Inside the strategies: whose batch, whose learning rate, whose weights
# **The question.** My loss compares the rows of a batch with each other. Four GPUs: does each compare its own quarter only?
#
# **Predict first.** (1) A softmax over the batch, computed in each of two `dp` replicas: what does it sum to over all rows?
# (2) The gradient of a loss in which the other rows are the negatives: is it the same with `ddp` on four GPUs and with `ddp2`
# on two nodes of two? (3) Horovod multiplies the learning rate by the number of ranks: is it then still `ddp`?

# %%
import argparse
import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import multigpu.trainer as L
from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.errors import UserError, pluralize
from multigpu.models import CNN


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PTL_NodeBatch",
        "Learn to match two views of an image, with ddp2: a node's batch at once.",
    )
    parser.add_argument(
        "--nodes",
        type=flags.positive,
        default=2,
        help="nodes that this machine plays (default: 2)",
    )
    parser.add_argument(
        "--each", type=flags.positive, default=2, help="devices of a node (default: 2)"
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · What dp hands to `training_step_end`
# In `training_step` a batch is a piece of the batch. Lightning's old manual joins the pieces in `training_step_end` by
# `torch.cat(outputs, dim=1)`. What comes there? Prediction (1), and the same with a mean:

# %% tags=["active-ipynb"]
# from torch import nn
# from multigpu import vgpu
# from multigpu.strategies.dp import replicated
#
# def through_dp(rows, step, parts=2):
#     """What `step` gives for `rows`, cut over `parts` virtual GPUs and gathered by the strategy dp."""
#     model = nn.Identity()
#     model.forward = step
#     with vgpu.running(parts) as places:
#         return replicated(model, places)(rows.to(places[0])).cpu()
#
# rows = torch.arange(10.0).reshape(10, 1)
# outputs = through_dp(rows, lambda x: x)
# try:
#     torch.cat(outputs, dim=1)
# except TypeError:
#     print(f"a TypeError: what comes is one {type(outputs).__name__} of shape {tuple(outputs.shape)}, no list of two")
# in_replicas = through_dp(rows, lambda x: torch.softmax(x, 0)).sum()
# print(f"softmax over the batch sums to {in_replicas:.1f} if each replica computes it, to {torch.softmax(outputs, 0).sum():.1f} here")
# pieces = through_dp(rows, lambda x: torch.ones_like(x).sum(0), parts=4)  # ten rows on four devices
# means, right = through_dp(rows, lambda x: x.square().mean(0), parts=4), rows.square().mean()
# print(f"pieces {[int(n) for n in pieces]}: mean of the replicas' means {means.mean():.2f}, mean of all rows {right:.2f}")

# %% [markdown]
# ## Step 2 · A loss that needs the others
# Two views of each image: itself, and moved by a pixel. The loss (NCE, noise-contrastive estimation): each image must find its
# other view among those of the batch; the other images are the negatives. `training_step_end` has them, of all devices.

# %% tags=["active-ipynb"]
# from multigpu import plots
# rows = {"ddp, 4 ranks": 4, "ddp2, 2 nodes of 2 devices": 2}
# shares = [[list(range(rank, 24, ranks)) for rank in range(ranks)] for ranks in rows.values()]
# plots.shares(shares, "Compared with its own colour: in ddp2 twice as many", list(rows), 24)


# %%
def nce(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    likeness = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T / 0.2  # (rows, rows)
    return F.cross_entropy(likeness, torch.arange(len(one), device=one.device))


def moved(images: torch.Tensor) -> torch.Tensor:
    return torch.cat([images[..., -1:], images[..., :-1]], dim=-1)


class Pairs(L.LightningModule):
    def __init__(self, train: TensorDataset, args: argparse.Namespace):
        super().__init__()
        self.train_set, self.args, self.cnn = train, args, new_model(train, args)

    def train_dataloader(self) -> DataLoader:
        parts, mine = self.trainer.strategy.shard
        sampler = DistributedSampler(
            self.train_set, parts, mine, seed=self.args.seed, drop_last=True
        )
        return DataLoader(
            self.train_set, self.args.batch_size // parts, sampler=sampler, drop_last=True
        )

    def training_step(self, batch: list) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cnn(batch[0]), self.cnn(moved(batch[0]))

    def training_step_end(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = nce(*outputs)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.args.lr, momentum=0.9)


def new_model(train: TensorDataset, args: argparse.Namespace) -> CNN:
    torch.manual_seed(args.seed)
    return CNN(tuple(train[0][0].shape), 32)  # no classes: 32 numbers that describe an image


# %% [markdown]
# ## Step 3 · Train it
# `ddp2` is a process a node; here each rank plays one. `serial` does it in one process: the mean of the nodes' losses.


# %%
def train(
    args: argparse.Namespace,
    strategy: str = "ddp2",
    plays_a_node: bool = True,
    steps: int = -1,
) -> dict:
    if plays_a_node:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    devices.compute_exactly()
    module = Pairs(data.load(data.fetch(args.data))[0], args)
    off = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"),
        False,
    )
    each = args.each if strategy == "ddp2" else "auto"
    trainer = L.Trainer(
        strategy=strategy, devices=each, max_epochs=args.epochs, max_steps=steps, **off
    )
    trainer.fit(module)
    told = {
        "loss": float(trainer.callback_metrics["loss"]),
        "device": trainer.strategy.device.type,
    }
    return {**told, "model": module.cnn.cpu()}


def serial(images: TensorDataset, args: argparse.Namespace, steps: int = -1) -> CNN:
    model = new_model(images, args)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(args.seed + epoch)
        )
        for batch in order.split(args.batch_size)[: len(images) // args.batch_size][
            : steps if steps > 0 else None
        ]:
            optimizer.zero_grad()
            nodes = [
                images.tensors[0][batch[node :: args.nodes]] for node in range(args.nodes)
            ]
            (
                sum(nce(model(share), model(moved(share))) for share in nodes) / len(nodes)
            ).backward()
            optimizer.step()
    return model


@torch.no_grad()
def found_again(model: CNN, images: torch.Tensor) -> float:
    """The share of images whose nearest moved image is their own."""
    likeness = F.normalize(model(images), dim=1) @ F.normalize(model(moved(images)), dim=1).T
    return (likeness.argmax(1) == torch.arange(len(images))).float().mean().item()


def main(args: argparse.Namespace) -> None:
    world = launch.find(gpus_each=args.each)
    args.nodes = world.size if world.size > 1 else args.nodes
    args.batch_size, _ = flags.split(args.batch_size, args.nodes, args.each)
    files.writable_folder(args.out)
    images, test = data.load(data.fetch(args.data))
    if len(images) < args.batch_size:
        raise UserError(
            f"{len(images)} training images fill no batch of {args.batch_size}: lower --batch-size."
        )
    told = (
        train(args, plays_a_node=False)
        if world.size > 1
        else launch.call(train, args.nodes, args)[0]
    )
    if world.rank:
        return
    loss, right = (
        metrics.finite(told["loss"], args.epochs - 1, world),
        found_again(told["model"], test.tensors[0]),
    )
    print(f"ddp2 on {args.nodes} × {args.each} {told['device']}: loss {loss:.2f}")
    print(
        f"test images that find their other view first: {right:.2f}; by chance {1 / len(test):.3f}"
    )
    what, verdict = (
        f"ddp2 equals the nodes' batches in one process after {pluralize(args.epochs, 'epoch')}",
        None,
    )
    if args.prove:
        verdict = proof.verdict(
            what, proof.difference(told["model"], serial(images, args)), 1e-5
        )
    content = {
        "devices": args.nodes * args.each,
        "device": told["device"],
        "world_size": args.nodes,
        "loss": loss,
    }
    content |= {"test_accuracy": right, "proof": verdict}
    print(f"metrics: {files.write_json(args.out / 'metrics.json', content)}", flush=True)
    if verdict and not verdict["holds"]:
        raise SystemExit(1)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# **One step** with learning rate 1 is the gradient. Of 64 images two nodes compare 32 each, four ranks 16: prediction (2).

# %% tags=["active-ipynb"]
# args, (images, _) = parse(["--epochs", "1", "--batch-size", "64", "--lr", "1"]), data.load(data.fetch(None))
# should = serial(images, args, steps=1)
# print(f"largest gradient {proof.difference(new_model(images, args), should):.3f}")
# for name, ranks in (("ddp2", 2), ("ddp", 4)):
#     away = proof.difference(launch.call(train, ranks, args, name, name == "ddp2", 1)[0]["model"], should)
#     print(f"{name}: {away:.3f} from the gradient of the nodes' batches; max difference {away:.1e}")

# %% [markdown]
# ## Whose learning rate? Whose process group?
# Five steps without the Trainer. `Mine` overrides how the ranks meet, and the wrapper. Horovod: prediction (3).

# %% tags=["active-ipynb"]
# import torch.distributed as dist
# from torch.nn.parallel import DistributedDataParallel
# from multigpu.strategies import DDPStrategy, HorovodStrategy
#
# class Mine(DDPStrategy):
#     def init_dist_connection(self):
#         dist.init_process_group("gloo")  # by the launcher's variables
#
#     def configure_ddp(self, model, device_ids):
#         return DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True)
#
# def five_steps(strategy, lr):
#     strategy.connect()
#     torch.manual_seed(0)
#     wrapped, optimizer = strategy.setup(model := nn.Linear(8, 3), torch.optim.SGD(model.parameters(), lr))
#     for step in range(5):
#         own = torch.Generator().manual_seed(10 * step + strategy.world.rank)
#         wrapped(torch.randn(4, 8, generator=own)).square().mean().backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     return model
#
# ddp = launch.call(five_steps, 2, DDPStrategy(), 0.1)[0]
# for name, strategy, lr in (("Mine", Mine(), 0.1), ("horovod", HorovodStrategy(), 0.1), ("horovod, lr / 2", HorovodStrategy(), 0.05)):
#     print(f"{name:15} {proof.difference(launch.call(five_steps, 2, strategy, lr)[0], ddp):.3f} from ddp")

# %% [markdown]
# ## Whose weights?
# `decentralized` averages weights: four ranks start with 0, 1, 2, 3 and learn nothing. `bytegrad` sends a byte for a number.

# %% tags=["active-ipynb"]
# def exchanges():
#     from multigpu.strategies.bytegrad import byte_mean
#     from multigpu.strategies.decentralized import Decentralized
#     dist.init_process_group("gloo")
#     told, model = [], nn.Linear(1, 1, bias=False)
#     still = torch.optim.SGD(model.parameters(), lr=0.0)
#     Decentralized("shift_one").attach(model, [still], None)
#     nn.init.constant_(model.weight, dist.get_rank())
#     for _ in range(3):
#         model(torch.ones(1, 1)).sum().backward()
#         still.step()
#         told.append(round(model.weight.item(), 2))
#     numbers = torch.randn(10_000, generator=torch.Generator().manual_seed(dist.get_rank()))
#     dist.all_reduce(mean := numbers.clone(), dist.ReduceOp.AVG)
#     dist.all_reduce(span := numbers.max() - numbers.min(), dist.ReduceOp.AVG)
#     return told, (byte_mean(numbers) - mean).abs().max(), (span + mean.max() - mean.min()) / 510
#
# ranks = launch.call(exchanges, 4)
# print("one peer at a time:", *([told[step] for told, *_ in ranks] for step in range(3)))
# print("bytegrad: largest error {1:.3f}, bound {2:.3f}: half a level in each of two roundings".format(*ranks[0]))

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PTL_NodeBatch.py --prove --epochs 3 --out results/10-nodes
# print(metrics.line("10 ddp2, a node's batch", "results/10-nodes"))
