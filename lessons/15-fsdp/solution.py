# %% [markdown]
# # Exercises: ZeRO and FSDP
# 50 minutes, 20 points, after the notebook PT_GPT_FSDP. You need no GPU. Run the cells from
# top to bottom. Write each answer in its own cell, below the line `# answer: …`, which must
# stay, with the imports and helpers that it needs; then run the checks below it. They say what
# is wrong. Hidden checks try other values when your notebook is graded.
#
# The checks start a process for each rank, which runs only the cells that begin with `# given`
# or `# answer`. The checks are the network between the ranks, and record what is sent.

# %% jupyter={"source_hidden": true}
# setup
from multigpu.exercise import Exercise

exercise = Exercise("15-fsdp")


def random_tensors(shapes, generator):
    return [torch.randn(shape, generator=generator) for shape in shapes]


def kinds(calls):
    return [call.kind for call in calls]


def adamw(weights, of_ranks, lr):
    """AdamW on one GPU with the ranks' mean gradients: of_ranks[rank][step][weight]."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = torch.optim.AdamW(parameters, lr)
    for of_step in zip(*of_ranks, strict=True):
        for parameter, gradients in zip(parameters, zip(*of_step, strict=True), strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def linear(parts, rows, gradients):
    """For each rank what `layer_step` returns, computed without ranks."""
    weight = torch.cat(parts)
    whole = [gradient.T @ x for gradient, x in zip(gradients, rows, strict=True)]
    of_parts = torch.stack(whole).mean(0).chunk(len(parts))
    return [
        [x @ weight.T, gradient @ weight, part]
        for x, gradient, part in zip(rows, gradients, of_parts, strict=True)
    ]


def clipped(of_ranks, limit):
    """(norm, gradients) for each rank: the norm is that of all ranks' gradients."""
    norm = torch.cat([part.flatten() for own in of_ranks for part in own]).norm()
    scale = min(1.0, limit / norm.item())
    return [[norm.item(), [part * scale for part in own]] for own in of_ranks]


# %%
# given
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# %% [markdown]
# ## 1. Predict: what a GPU keeps and sends (2 points)
# A model of 6 billion weights trains with AdamW, all in 32 bit. On two nodes of 8 GPUs, HSDP
# shares within the nodes. How many GB (10⁹ bytes) of weights, gradients and AdamW's state does
# a GPU keep, when backward has ended? And on one node of 8 GPUs with FSDP, which frees weights
# after forward: how many GB does a GPU send in a step, in rings?

# %%
# answer: guess_share
guess_kept = None  # GB, HSDP on two nodes
guess_sent = None  # GB, FSDP on one node
### BEGIN SOLUTION
guess_kept = 6 * 16 / 8
guess_sent = 3 * 6 * 4 * 7 / 8
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_share", "kept", points=1) as student:
    student.guess(
        "guess_kept",
        6 * 16 / 8,
        "this is what a GPU keeps",
        "how many bytes has a weight with AdamW, and how many GPUs share a copy?",
        within=0.1,
        unit="GB",
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_share", "sent", points=1) as student:
    student.guess(
        "guess_sent",
        3 * 6 * 4 * 7 / 8,
        "this is what a GPU sends",
        "what travels in a step, how often, and which part does a GPU send?",
        within=0.5,
        unit="GB",
    )

# %% [markdown]
# ## 2. A sharded AdamW (7 points)
# Write `ShardedAdamW(weights, lr)`. All ranks have the same weights, and after a backward each
# has other gradients. `step()` makes the step that `torch.optim.AdamW` makes with the mean of
# the ranks' gradients, and all ranks have the new weights afterwards.
#
# - A rank keeps AdamW's state for its part alone: an n-th of the numbers of all weights. So
#   `torch.optim.AdamW` gets this part.
# - In a step, gradients go through `reduce_scatter`, and new weights through `all_gather`.
#   Nothing else is sent.
# - The number of all weights' elements need not be a multiple of the ranks. Then zeros at the
#   end make it one.


# %%
# given
def train(weights, gradients, lr):
    """What the program does on a rank: a step for each item of `gradients`."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = ShardedAdamW(parameters, lr)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


# %%
# answer: sharded_adamw
class ShardedAdamW:
    """AdamW, whose state the ranks share."""

    def __init__(self, weights, lr):
        ### BEGIN SOLUTION
        self.weights = weights
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.part = nn.Parameter(self.parts(weights)[self.rank].clone())
        self.optimizer = torch.optim.AdamW([self.part], lr)

    def parts(self, tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        flat = F.pad(flat, (0, -len(flat) % self.ranks))
        return list(flat.chunk(self.ranks))
        ### END SOLUTION

    def step(self):
        ### BEGIN SOLUTION
        self.part.grad = torch.empty_like(self.part)
        gradients = self.parts([weight.grad / self.ranks for weight in self.weights])
        dist.reduce_scatter(self.part.grad, gradients)
        self.optimizer.step()
        new = [torch.empty_like(self.part.data) for _ in range(self.ranks)]
        dist.all_gather(new, self.part.data)
        sizes = [weight.numel() for weight in self.weights]
        flat = torch.cat(new)[: sum(sizes)]
        for weight, values in zip(self.weights, flat.split(sizes), strict=True):
            weight.data.copy_(values.view_as(weight))
        ### END SOLUTION


# %% jupyter={"source_hidden": true}
with exercise.check("sharded_adamw", "two ranks", points=3) as student:
    shapes = [(4, 6), (6,), (2, 5)]
    weights = random_tensors(shapes, student.generator)
    of_ranks = [
        [random_tensors(shapes, student.generator) for _ in range(3)] for _ in range(2)
    ]
    run = student.ranks("train", [[weights, own, 0.1] for own in of_ranks])
    expected = adamw(weights, of_ranks, 0.1)
    student.close_to(run.values[0], expected, "rank 0's weights are AdamW's", atol=1e-5)
    student.close_to(run.values[1], expected, "rank 1's weights are AdamW's", atol=1e-5)

# %% jupyter={"source_hidden": true}
with exercise.check("sharded_adamw", "what is sent", points=2) as student:
    shapes = [(4, 6), (8,)]
    weights = random_tensors(shapes, student.generator)
    of_ranks = [[random_tensors(shapes, student.generator)] for _ in range(2)]
    run = student.ranks("train", [[weights, own, 0.1] for own in of_ranks])
    for kind, nbytes in (("reduce_scatter", 4 * 32), ("all_gather", 4 * 16)):
        sent = sum(call.bytes for call in run.calls[0] if call.kind == kind)
        student.equal(sent, nbytes, f"the bytes that rank 0 gives to {kind}")
    others = set(kinds(run.calls[0])) - {"reduce_scatter", "all_gather"}
    student.expect(not others, "nothing else is sent", f"there is {', '.join(others)}")
    gathered = [
        values.flatten()
        for calls in run.calls
        for call in calls
        if call.kind == "all_gather"
        for values in call.tensors
    ]
    new = torch.cat([weight.flatten() for weight in adamw(weights, of_ranks, 0.1)])
    student.close_to(
        torch.cat([torch.zeros(0), *gathered]).sort()[0],
        new.sort()[0],
        "what is gathered are the new weights",
        atol=1e-5,
    )

# %% jupyter={"source_hidden": true}
with exercise.check(
    "sharded_adamw", "three ranks, odd sizes", points=2, hidden=True
) as student:
    rows = 3 * student.random.randint(1, 3)
    shapes = [(rows, 7), (rows + 2,), (5,)]
    weights = random_tensors(shapes, student.generator)
    of_ranks = [
        [random_tensors(shapes, student.generator) for _ in range(2)] for _ in range(3)
    ]
    run = student.ranks("train", [[weights, own, 0.05] for own in of_ranks])
    expected = adamw(weights, of_ranks, 0.05)
    student.close_to(run.values, [expected] * 3, "the weights are AdamW's", atol=1e-5)

# %% [markdown]
# ## 3. ZeRO-3's linear layer (6 points)
# Each rank has some rows of a linear layer's weight: rank r of n has the r-th of n equal
# parts, `part` (out ÷ n, in). Write `ShardedLinear`, whose `apply(x, part)` returns x
# (rows, in) times the whole weight, transposed: (rows, out). Each rank has another x.
#
# - Backward gives `x` its gradient, and `part` its rows of the weight's gradient, which is the
#   mean over the ranks.
# - Between forward and backward, a rank keeps its part of the weight alone.


# %%
# given
def layer_step(part, x, gradient):
    """A forward and a backward on one rank; `gradient` is that of the layer's output."""
    part, x = part.clone().requires_grad_(), x.clone().requires_grad_()
    y = ShardedLinear.apply(x, part)
    y.backward(gradient)
    return [y.detach(), x.grad, part.grad]


# %%
# answer: sharded_linear
class ShardedLinear(torch.autograd.Function):
    """x (rows, in), part (out ÷ ranks, in) → (rows, out)."""

    ### BEGIN SOLUTION
    @staticmethod
    def whole(part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    ### END SOLUTION
    @staticmethod
    def forward(ctx, x, part):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, part)
        return x @ ShardedLinear.whole(part).T
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        x, part = ctx.saved_tensors
        of_x = gradient @ ShardedLinear.whole(part)
        ranks = dist.get_world_size()
        of_part = torch.empty_like(part)
        dist.reduce_scatter(of_part, list((gradient.T @ x / ranks).chunk(ranks)))
        return of_x, of_part
        ### END SOLUTION


# %% jupyter={"source_hidden": true}
with exercise.check("sharded_linear", "forward", points=1) as student:
    parts = random_tensors([(3, 4)] * 2, student.generator)
    rows = random_tensors([(5, 4)] * 2, student.generator)
    gradients = random_tensors([(5, 6)] * 2, student.generator)
    run = student.ranks("layer_step", list(zip(parts, rows, gradients, strict=True)))
    expected = linear(parts, rows, gradients)
    for rank in range(2):
        student.close_to(run.values[rank][0], expected[rank][0], f"rank {rank}'s output")

# %% jupyter={"source_hidden": true}
with exercise.check("sharded_linear", "backward", points=2) as student:
    parts = random_tensors([(3, 4)] * 2, student.generator)
    rows = random_tensors([(5, 4)] * 2, student.generator)
    gradients = random_tensors([(5, 6)] * 2, student.generator)
    run = student.ranks("layer_step", list(zip(parts, rows, gradients, strict=True)))
    expected = linear(parts, rows, gradients)
    for rank in range(2):
        student.close_to(run.values[rank][1], expected[rank][1], f"rank {rank}: x's gradient")
        student.close_to(run.values[rank][2], expected[rank][2], f"rank {rank}: its part's")

# %% jupyter={"source_hidden": true}
with exercise.check("sharded_linear", "what is kept", points=2) as student:
    parts = random_tensors([(3, 4)] * 2, student.generator)
    rows = random_tensors([(5, 4)] * 2, student.generator)
    gradients = random_tensors([(5, 6)] * 2, student.generator)
    run = student.ranks("layer_step", list(zip(parts, rows, gradients, strict=True)))
    gathers = kinds(run.calls[0]).count("all_gather")
    student.expect(
        gathers == 2,
        "the weight is gathered twice: in forward and in backward",
        f"it is gathered {gathers} times: what does forward keep for backward?",
    )
    student.equal(
        run.sent(0),
        4 * (2 * 12 + 24),
        "the bytes that rank 0 gives: its part twice, and a gradient of the whole weight",
    )
    expected = linear(parts, rows, gradients)
    student.close_to(run.values[0][0], expected[0][0], "rank 0's output")

# %% jupyter={"source_hidden": true}
with exercise.check(
    "sharded_linear", "three ranks, other sizes", points=1, hidden=True
) as student:
    out, into = student.random.randint(1, 3), student.random.randint(2, 6)
    parts = random_tensors([(out, into)] * 3, student.generator)
    counts = [student.random.randint(1, 5) for _ in range(3)]
    rows = random_tensors([(count, into) for count in counts], student.generator)
    gradients = random_tensors([(count, 3 * out) for count in counts], student.generator)
    run = student.ranks("layer_step", list(zip(parts, rows, gradients, strict=True)))
    expected = linear(parts, rows, gradients)
    student.close_to(run.values, expected, "output, x's gradient, the part's", atol=1e-5)

# %% [markdown]
# ## 4. Find the bug: gradient clipping (5 points)
# With FSDP a rank has parts of the gradients. A program clips them with the function below.
# On one GPU it is right. On two ranks there is no error, and the model trains worse.
#
# Write `clip(gradients, limit)` without the bug: it scales this rank's gradients, in place, as
# clipping on one GPU scales them, and returns the norm on one GPU, before clipping. A rank may
# have no gradients, and a rank sends a few numbers, no gradients.


# %%
# given
def broken_clip(gradients, limit):
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / norm.item()))
    return norm.item()


def clip_step(gradients, limit):
    """What the program does on one rank: the norm, and the gradients after clipping."""
    gradients = [gradient.clone() for gradient in gradients]
    return [clip(gradients, limit), gradients]


# %%
# answer: clip
def clip(gradients, limit):
    """Clip the gradients of all ranks together. Returns their norm before it, a number."""
    ### BEGIN SOLUTION
    total = torch.zeros(())
    for gradient in gradients:
        total += gradient.square().sum()
    dist.all_reduce(total)
    norm = total.sqrt().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / max(norm, 1e-6)))
    return norm
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
with exercise.check("clip", "two ranks", points=2) as student:
    of_ranks = [random_tensors([(3, 4), (5,)], student.generator) for _ in range(2)]
    of_ranks[1] = [3 * gradient for gradient in of_ranks[1]]
    run = student.ranks("clip_step", [[own, 2.0] for own in of_ranks])
    for rank, (norm, gradients) in enumerate(clipped(of_ranks, 2.0)):
        student.close_to(run.values[rank][0], norm, f"rank {rank} returns the norm of all")
        student.close_to(run.values[rank][1], gradients, f"rank {rank}'s gradients")
    student.expect(run.sent(0) <= 16, "a rank sends a few numbers", f"{run.sent(0)} bytes")

# %% jupyter={"source_hidden": true}
with exercise.check("clip", "below the limit", points=1) as student:
    of_ranks = [random_tensors([(3, 4)], student.generator) for _ in range(2)]
    run = student.ranks("clip_step", [[own, 100.0] for own in of_ranks])
    expected = clipped(of_ranks, 100.0)
    student.close_to(run.values, expected, "the norm of all, and gradients that stay")

# %% jupyter={"source_hidden": true}
with exercise.check("clip", "a rank without gradients", points=2, hidden=True) as student:
    of_ranks = [random_tensors([(3, 4)] * n, student.generator) for n in (2, 0, 1)]
    limit = student.random.uniform(0.5, 1.5)
    run = student.ranks("clip_step", [[own, limit] for own in of_ranks])
    student.close_to(run.values, clipped(of_ranks, limit), "norm and gradients of all ranks")

# %%
exercise.summary()
