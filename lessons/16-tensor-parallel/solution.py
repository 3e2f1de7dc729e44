# %% [markdown]
# # Exercises: tensor and sequence parallelism
# 45 minutes, 20 points, after the notebook PT_GPT_TensorParallel. You need no GPU. Run the
# cells from top to bottom. Write each answer in its own cell, below the line `# answer: …`,
# which must stay, with the imports and helpers that it needs; then run the checks below it.
# They say what is wrong. Hidden checks try other values when your notebook is graded.
#
# The checks start a process for each rank, which runs only the cells that begin with `# given`
# or `# answer`. They are the network between the ranks, and record each collective.

# %% jupyter={"source_hidden": true}
# setup
from multigpu.exercise import Exercise

exercise = Exercise("16-tensor-parallel")


def random_mlp(width, hidden, generator):
    """up's weight and bias, down's weight and bias."""
    shapes = (hidden, width), (hidden,), (width, hidden), (width,)
    return [torch.randn(shape, generator=generator) / 2 for shape in shapes]


def part_of(gradients, rank, ranks):
    """A rank's part of the whole gradients of up's weight and bias, and of down's."""
    up, up_bias, down, down_bias = gradients
    return [
        up.chunk(ranks)[rank],
        up_bias.chunk(ranks)[rank],
        down.chunk(ranks, 1)[rank],
        down_bias,
    ]


def own_alone(mlp, rank, ranks):
    """The layers with NaN in place of the numbers of other ranks' parts."""
    up, up_bias, down, down_bias = (weight.clone() for weight in mlp)
    for whole, dim in ((up, 0), (up_bias, 0), (down, 1)):
        for other, part in enumerate(whole.chunk(ranks, dim)):
            if other != rank:
                part.fill_(torch.nan)
    return [up, up_bias, down, down_bias]


def serial_mlp(mlp, x):
    """What one process computes: outputs, the gradient of x, gradients of the weights."""
    mlp = [weight.clone().requires_grad_() for weight in mlp]
    x = x.clone().requires_grad_()
    up, up_bias, down, down_bias = mlp
    y = F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
    y.square().sum().backward()
    return y.detach(), x.grad, [weight.grad for weight in mlp]


def serial_step(mlp, places, x):
    """What one process computes of sequence_step: the gradients by name."""
    mlp = [weight.clone().requires_grad_() for weight in mlp]
    places = places.clone().requires_grad_()
    norm = nn.LayerNorm(x.shape[-1])
    up, up_bias, down, down_bias = mlp
    x = x + places
    y = x + F.linear(F.gelu(F.linear(norm(x), up, up_bias)), down, down_bias)
    y.square().sum().backward()
    gradients = [weight.grad for weight in (places, norm.weight, norm.bias, *mlp)]
    names = ("places", "norm.weight", "norm.bias", "up", "up_bias", "down", "down_bias")
    return dict(zip(names, gradients, strict=True))


def expected_of(rank, ranks, serial):
    """The gradients of a rank, by name."""
    names = ("up", "up_bias", "down", "down_bias")
    parts = part_of([serial[name] for name in names], rank, ranks)
    return serial | dict(zip(names, parts, strict=True))


# %% [markdown]
# ## 1. Predict (4 points)
# A GPT has 24 blocks, each with `qkv`, `out`, `up`, `down` and two LayerNorms, all with a
# weight and a bias.

# %%
# answer: guess_exchanges
guess_all_reduces = None  # in all blocks, forward and backward of one step, tensor parallel
guess_incomplete = None  # sequence parallel: how many of a block's 12 weights and biases have,
# after backward, a gradient of the rank's own tokens alone?
### BEGIN SOLUTION
guess_all_reduces = 96
guess_incomplete = 6
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_exchanges", "all-reduces", points=2) as student:
    student.guess(
        "guess_all_reduces",
        24 * 2 * 2,
        "the all-reduces of 24 blocks",
        "how many f and how many g has a block, and in which direction does each add up?",
        within=0,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_exchanges", "incomplete gradients", points=2) as student:
    student.guess(
        "guess_incomplete",
        6,
        "the weights and biases that see the rank's own tokens alone",
        "which of them are used after a reduce-scatter and before an all-gather?",
        within=0,
    )

# %% [markdown]
# ## 2. Write both linears (10 points)
# `Column(weight, bias)` and `Row(weight, bias)` get a whole linear layer, on every rank the
# same one. Each keeps this rank's part as `self.weight` and `self.bias`, two `nn.Parameter`.
#
# - `Column`: the rank has equal parts of the outputs, in the order of the ranks. It gets all
#   inputs.
# - `Row`: the rank has equal parts of the inputs, and gets those. It returns the whole output,
#   on all ranks. Its bias is whole.
# - After backward the gradient of Column's input is whole on all ranks, and the parameters
#   have the gradients of one process, or their part of them.
# - In forward and backward together, an MLP of both has two all-reduces, and sends nothing
#   else. A rank computes with its own parts: a hidden check gives it no other numbers.

# %%
# given
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def mlp_step(mlp, x):
    """One rank's step: the output, the gradient of x, the gradients of the parameters."""
    up, up_bias, down, down_bias = mlp
    column, row = Column(up, up_bias), Row(down, down_bias)
    x = x.clone().requires_grad_()
    y = row(F.gelu(column(x)))
    y.square().sum().backward()
    gradients = [weight.grad for weight in (column.weight, column.bias, row.weight, row.bias)]
    return y.detach(), x.grad, gradients


# %%
# answer: linears
### BEGIN SOLUTION
class Before(torch.autograd.Function):
    """Megatron's f: nothing in forward, the sum over the ranks in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class After(torch.autograd.Function):
    """Megatron's g: the sum in forward, nothing in backward."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


### END SOLUTION
class Column(nn.Module):
    """A part of a linear layer's outputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        super().__init__()
        ### BEGIN SOLUTION
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(weight.chunk(ranks)[rank].clone())
        self.bias = nn.Parameter(bias.chunk(ranks)[rank].clone())
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        return F.linear(Before.apply(x), self.weight, self.bias)
        ### END SOLUTION


class Row(nn.Module):
    """The outputs of a linear layer, from a part of its inputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        super().__init__()
        ### BEGIN SOLUTION
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(weight.chunk(ranks, 1)[rank].clone())
        self.bias = nn.Parameter(bias.clone())
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        return After.apply(F.linear(x, self.weight)) + self.bias
        ### END SOLUTION


# %%
with exercise.check("linears", "outputs", points=2) as student:
    mlp = random_mlp(6, 8, student.generator)
    x = torch.randn(3, 6, generator=student.generator)
    run = student.ranks("mlp_step", [[mlp, x]] * 2)
    y, _, _ = serial_mlp(mlp, x)
    student.close_to(
        [found for found, _, _ in run.values], [y] * 2, "both ranks have the whole output"
    )

# %%
with exercise.check("linears", "gradient of the input", points=2) as student:
    mlp = random_mlp(6, 8, student.generator)
    x = torch.randn(3, 6, generator=student.generator)
    run = student.ranks("mlp_step", [[mlp, x]] * 2)
    _, gradient, _ = serial_mlp(mlp, x)
    student.close_to(
        [found for _, found, _ in run.values],
        [gradient] * 2,
        "both ranks have the whole gradient of the input",
    )

# %%
with exercise.check("linears", "gradients of the weights", points=2) as student:
    mlp = random_mlp(6, 8, student.generator)
    x = torch.randn(3, 6, generator=student.generator)
    run = student.ranks("mlp_step", [[mlp, x]] * 2)
    _, _, gradients = serial_mlp(mlp, x)
    for rank, (_, _, found) in enumerate(run.values):
        student.close_to(
            found, part_of(gradients, rank, 2), f"rank {rank} has its part of the gradients"
        )

# %%
with exercise.check("linears", "what is sent", points=2) as student:
    mlp = random_mlp(6, 8, student.generator)
    x = torch.randn(3, 6, generator=student.generator)
    run = student.ranks("mlp_step", [[mlp, x]] * 2)
    for rank, calls in enumerate(run.calls):
        sent = [(call.kind, call.bytes) for call in calls]
        student.equal(
            sent,
            [("all_reduce", 4 * 3 * 6)] * 2,
            f"rank {rank} sends the output in forward, the input's gradient in backward",
        )

# %%
with exercise.check("linears", "more ranks", points=2, hidden=True) as student:
    ranks = student.random.randint(3, 4)
    width, hidden = student.random.randint(4, 7), ranks * student.random.randint(1, 3)
    mlp = random_mlp(width, hidden, student.generator)
    x = torch.randn(2, 3, width, generator=student.generator)
    run = student.ranks(
        "mlp_step", [[own_alone(mlp, rank, ranks), x] for rank in range(ranks)]
    )
    y, gradient, gradients = serial_mlp(mlp, x)
    student.close_to(
        [found[:2] for found in run.values],
        [(y, gradient)] * ranks,
        "all ranks have the whole output and the whole gradient of the input",
        rtol=1e-4,
    )
    student.close_to(
        [found for _, _, found in run.values],
        [part_of(gradients, rank, ranks) for rank in range(ranks)],
        "each rank has its part of the gradients",
        rtol=1e-4,
    )

# %% [markdown]
# ## 3. Find the missing reduction (6 points)
# `sequence_step` computes one step of a norm and an MLP with sequence parallelism. It has a
# fault: after backward, some gradients are not those of one process, or their part of them.
# Write `finish(model)`, which it calls after backward: it makes them right, and changes no
# other.


# %%
# given
def own(x):
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def add_own(x):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), 1)]
    total = torch.empty_like(parts[0])
    dist.reduce_scatter(total, parts)
    return total


class Exchange(torch.autograd.Function):
    """ahead(x) in forward, back(gradient) in backward."""

    @staticmethod
    def forward(ctx, x, ahead, back):
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


class SequenceMLP(nn.Module):
    """All tokens (batch, tokens, width) → this rank's tokens of places, a norm and an MLP."""

    def __init__(self, mlp, places):
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        up, up_bias, down, down_bias = mlp
        self.places = nn.Parameter(places.clone())
        self.norm = nn.LayerNorm(up.shape[1])
        self.up = nn.Parameter(up.chunk(ranks)[rank].clone())
        self.up_bias = nn.Parameter(up_bias.chunk(ranks)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks, 1)[rank].clone())
        self.down_bias = nn.Parameter(down_bias.clone())

    def forward(self, x):
        x = Exchange.apply(x + self.places, own, gather)
        y = Exchange.apply(self.norm(x), gather, add_own)
        y = F.linear(F.gelu(F.linear(y, self.up, self.up_bias)), self.down)
        return x + Exchange.apply(y, add_own, gather) + self.down_bias


def sequence_step(mlp, places, x):
    """One rank's step: the gradients by name. The loss is a sum over all ranks' tokens."""
    model = SequenceMLP(mlp, places)
    model(x).square().sum().backward()
    finish(model)
    return {name: weight.grad for name, weight in model.named_parameters()}


# %%
# answer: finish
def finish(model: SequenceMLP) -> None:
    """Make the gradients whole that are of this rank's tokens alone."""
    ### BEGIN SOLUTION
    for weight in (model.norm.weight, model.norm.bias, model.down_bias):
        dist.all_reduce(weight.grad)
    ### END SOLUTION


# %%
with exercise.check("finish", "the norm", points=2) as student:
    mlp = random_mlp(6, 8, student.generator)
    places = torch.randn(4, 6, generator=student.generator)
    x = torch.randn(2, 4, 6, generator=student.generator)
    run = student.ranks("sequence_step", [[mlp, places, x]] * 2)
    serial = serial_step(mlp, places, x)
    for name in ("norm.weight", "norm.bias"):
        student.close_to(
            [found[name] for found in run.values],
            [serial[name]] * 2,
            f"both ranks have the gradient of {name}",
            rtol=1e-4,
        )

# %%
with exercise.check("finish", "the other weights", points=2) as student:
    mlp = random_mlp(6, 8, student.generator)
    places = torch.randn(4, 6, generator=student.generator)
    x = torch.randn(2, 4, 6, generator=student.generator)
    run = student.ranks("sequence_step", [[mlp, places, x]] * 2)
    serial = serial_step(mlp, places, x)
    for name in ("places", "up", "up_bias", "down", "down_bias"):
        student.close_to(
            [found[name] for found in run.values],
            [expected_of(rank, 2, serial)[name] for rank in range(2)],
            f"both ranks have the gradient of {name}, or their part of it",
            rtol=1e-4,
        )

# %%
with exercise.check("finish", "more ranks", points=2, hidden=True) as student:
    ranks = student.random.randint(3, 4)
    width, hidden = student.random.randint(4, 7), ranks * student.random.randint(1, 3)
    tokens = ranks * student.random.randint(1, 2)
    mlp = random_mlp(width, hidden, student.generator)
    places = torch.randn(tokens, width, generator=student.generator)
    x = torch.randn(2, tokens, width, generator=student.generator)
    run = student.ranks("sequence_step", [[mlp, places, x]] * ranks)
    serial = serial_step(mlp, places, x)
    for name in serial:
        student.close_to(
            [found[name] for found in run.values],
            [expected_of(rank, ranks, serial)[name] for rank in range(ranks)],
            f"all ranks have the gradient of {name}, or their part of it",
            rtol=1e-4,
        )

# %%
exercise.summary()
