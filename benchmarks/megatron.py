"""Megatron-LM's GPT as a CUDA program: tensor, pipeline and data parallelism.

    torchrun … megatron.py --layers 24 --hidden 2304 --heads 24 --micro-batch 16 --batch 512

world.py runs it under `multigpu virtual --world`. It has what Megatron-LM of 2021 does in a
step: fp16, unfused attention with fused elementwise kernels (megatron_gpt.Fused), tensor
parallelism with two all-reduces in each half of a layer's step (Shoeybi et al., "Megatron-LM",
arXiv 1909.08053) or with sequence parallelism (Korthikanti et al., arXiv 2205.05198), 1F1B
pipelines without interleaving, one all-reduce of all gradients after the last micro-batch, and
Adam on float32 copies of the weights.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_gpt import Fused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

WORDS = 51_200


class Copy(torch.autograd.Function):
    """The same tensor on all ranks of a group; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """The sum of the ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad, None


class Gather(torch.autograd.Function):
    """The ranks' parts of the sequence, one after the other; their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return scatter_sum(grad, ctx.group), None


class ScatterSum(torch.autograd.Function):
    """This rank's part of the sequence of the sum of the ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return scatter_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return gather(grad, ctx.group), None


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def scatter_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


class TensorGroup:
    """What enters and leaves the parts of a layer that are divided among the ranks."""

    def __init__(self, group: dist.ProcessGroup, sequence: bool):
        self.group = group
        self.size = group.size()
        self.into = Gather if sequence else Copy
        self.out_of = ScatterSum if sequence else Sum

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else self.into.apply(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else self.out_of.apply(x, self.group)


class Layer(nn.Module):
    """A transformer layer: (sequence, batch, hidden) → the same shape."""

    def __init__(self, hidden: int, heads: int, ranks: TensorGroup, recompute: str):
        super().__init__()
        self.ranks = ranks
        self.heads = heads // ranks.size
        self.recompute = recompute
        self.first_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden // ranks.size)
        self.dense = nn.Linear(hidden // ranks.size, hidden, bias=False)
        self.dense_bias = nn.Parameter(torch.empty(hidden))
        self.second_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden // ranks.size, bias=False)
        self.up_bias = nn.Parameter(torch.empty(4 * hidden // ranks.size))
        self.down = nn.Linear(4 * hidden // ranks.size, hidden, bias=False)
        self.down_bias = nn.Parameter(torch.empty(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "full":
            return checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.qkv(self.ranks.enter(self.first_norm(x)))
        if self.recompute == "selective":
            context = checkpoint(
                self.attend, mixed, use_reentrant=False, preserve_rng_state=False
            )
        else:
            context = self.attend(mixed)
        x = Fused.apply(self.ranks.leave(self.dense(context)), self.dense_bias, x)
        inner = Fused.apply(self.up(self.ranks.enter(self.second_norm(x))), self.up_bias)
        return Fused.apply(self.ranks.leave(self.down(inner)), self.down_bias, x)

    def attend(self, mixed: torch.Tensor) -> torch.Tensor:
        """Attention of this rank's heads."""
        length, batch, width = mixed.shape
        mixed = mixed.view(length, batch * self.heads, width // self.heads)
        query, key, value = mixed.split(mixed.shape[2] // 3, dim=2)
        scores = query.new_empty(batch * self.heads, length, length)
        scores = torch.baddbmm(scores, query.transpose(0, 1), key.permute(1, 2, 0), beta=0.0)
        chances = F.dropout(torch.softmax(scores, dim=2), 0.1)
        context = torch.bmm(chances, value.transpose(0, 1))
        return context.transpose(0, 1).contiguous().view(length, batch, width // 3)


class Stage(nn.Module):
    """One pipeline stage; the first one takes tokens, the last one returns logits."""

    def __init__(self, args: argparse.Namespace, ranks: TensorGroup, first: bool, last: bool):
        super().__init__()
        self.ranks = ranks
        self.layers = nn.Sequential(
            *(
                Layer(args.hidden, args.heads, ranks, args.recompute)
                for _ in range(args.layers // args.stages)
            )
        )
        # Each rank has its part of the words.
        self.words = nn.Embedding(WORDS // ranks.size, args.hidden) if first else None
        self.places = nn.Embedding(args.length, args.hidden) if first else None
        self.norm = nn.LayerNorm(args.hidden) if last else None
        self.logits = nn.Linear(args.hidden, WORDS // ranks.size, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.words is not None:
            places = torch.arange(x.shape[1], device=x.device)
            words = self.words(x % self.words.num_embeddings)
            x = F.dropout(words + self.places(places), 0.1).transpose(0, 1).contiguous()
            x = self.ranks.leave(x)
        x = self.layers(x)
        if self.logits is not None:
            x = self.logits(self.ranks.enter(self.norm(x)))
        return x

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy with the words divided among the ranks.

        They exchange the largest logit, the target's logit and the sum of the exponentials of
        each token. The numbers are those of this rank's words, because only shapes count.
        """
        losses = F.cross_entropy(
            logits.float().flatten(0, 1),
            targets.t().flatten() % logits.shape[-1],
            reduction="none",
        )
        if self.ranks.size > 1:
            for _ in range(3):
                dist.all_reduce(losses.detach().clone(), group=self.ranks.group)
        return losses.mean()


class Adam:
    """Adam on float32 copies of fp16 weights, whose gradients are views of one tensor."""

    def __init__(self, model: nn.Module):
        self.weights = list(model.parameters())
        sizes = [weight.numel() for weight in self.weights]
        self.gradients = self.weights[0].new_zeros(sum(sizes))
        for weight, part in zip(self.weights, self.gradients.split(sizes), strict=True):
            weight.grad = part.view_as(weight)
        self.masters = [weight.detach().float() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    def step(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.grad.float()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        with torch.no_grad():
            self.optimizer.step()
            self.optimizer.zero_grad()
            torch._foreach_copy_(self.weights, self.masters)
        self.gradients.zero_()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("layers", "hidden", "heads", "micro-batch", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--recompute", choices=("full", "selective", "none"), default="full")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = parse()
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    replicas = dist.get_world_size() // (args.tensor * args.stages)
    mesh: DeviceMesh = init_device_mesh(
        "cuda",
        (args.stages, replicas, args.tensor),
        mesh_dim_names=("stages", "replicas", "tensor"),
    )
    index = mesh.get_local_rank("stages")
    first, last = index == 0, index == args.stages - 1
    ranks = TensorGroup(mesh.get_group("tensor"), args.sequence_parallel)
    with device:
        model = Stage(args, ranks, first, last).half()
    optimizer = Adam(model)
    micro_batches = args.batch // replicas // args.micro_batch
    schedule = None
    if args.stages > 1:
        stage = PipelineStage(
            model, index, args.stages, device, group=mesh.get_group("stages")
        )
        schedule = Schedule1F1B(
            stage, n_microbatches=micro_batches, loss_fn=model.loss, scale_grads=False
        )
    for _ in range(args.steps):
        tokens = torch.zeros(
            micro_batches * args.micro_batch, args.length, dtype=torch.long, device=device
        )
        if schedule is None:
            for part in tokens.split(args.micro_batch):
                model.loss(model(part), part).backward()
        else:
            schedule.step(*([tokens] if first else []), **({"target": tokens} if last else {}))
        if replicas > 1:
            dist.all_reduce(optimizer.gradients, group=mesh.get_group("replicas"))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
