# %% [markdown]
# # Exercises: where the memory goes
# 40 minutes, 20 points, after the notebook PT_GPT_Memory. You need no GPU. Run the cells from
# top to bottom. Write each answer in its own cell, below the line `# answer: …`, which must
# stay, with the imports and helpers that it needs; then run the checks below it. They say what
# is wrong. Hidden checks try other values when your notebook is graded.

# %%
# setup
from multigpu.exercise import Exercise

exercise = Exercise("14-memory", imports=("torch.distributed.tensor",))


def measured(layers, hidden, rows):
    """The peak in the second step on a virtual A100, in bytes; nothing is computed."""
    import multigpu

    with multigpu.gpus(1, gpu="A100-80GB", memory="4096GiB", shapes_only=True) as (gpu,):
        with gpu:
            model = nn.Sequential(*(MLPBlock(hidden) for _ in range(layers)))
            x = torch.empty(rows, hidden)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated()


# %% [markdown]
# ## 1. What keeps graphs alive (4 points)
# A training loop notes three things. After 20 steps, how many of the 20 graphs are in memory
# because of each of them alone? (A graph has what backward of its step needs. Take it that
# the loop does not call backward.)

# %%
# given
import gc
import weakref

import torch
from torch import nn


class Graph:
    """Is in memory as long as the graph of a step."""


class Noted(torch.autograd.Function):
    """The identity; its node in the graph has a Graph, to which `graphs` gets a reference."""

    @staticmethod
    def forward(ctx, x, graphs):
        ctx.graph = Graph()
        graphs.append(weakref.ref(ctx.graph))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def graphs_alive(note, steps=20):
    """How many graphs are in memory after `steps` steps; note(loss, so_far) returns so_far."""
    weight = torch.ones(3, requires_grad=True)
    graphs = []
    so_far = None
    for _ in range(steps):
        loss = Noted.apply(weight * torch.rand(3), graphs).sum()
        so_far = note(loss, so_far)
        del loss
    gc.collect()
    return sum(reference() is not None for reference in graphs)


def losses(loss, so_far):
    return [*(so_far or []), loss]


def average(loss, so_far):
    return loss if so_far is None else 0.9 * so_far + 0.1 * loss


def detached(loss, so_far):
    return [*(so_far or []), loss.detach()]


# %%
# answer: guess_graphs
guess_losses = None  # with losses
guess_average = None  # with average
guess_detached = None  # with detached
### BEGIN SOLUTION
guess_losses = 20
guess_average = 20
guess_detached = 0
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_graphs", "losses", points=2) as student:
    student.guess(
        "guess_losses",
        graphs_alive(losses),
        "the graphs that the list of losses keeps",
        "a loss has a grad_fn: to what does that lead?",
        within=0,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_graphs", "average", points=1) as student:
    student.guess(
        "guess_average",
        graphs_alive(average),
        "the graphs that the moving average keeps",
        "of what is the new average computed?",
        within=0,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_graphs", "detached", points=1) as student:
    student.guess(
        "guess_detached",
        graphs_alive(detached),
        "the graphs that the list of detached losses keeps",
        "what does detach leave out?",
        within=0,
    )

# %% [markdown]
# ## 2. Predict a peak to 5% (8 points)
# The model has `layers` blocks of `hidden` units: `x + down(gelu(up(norm(x))))`, where `up`
# has `4 × hidden` outputs. It trains with AdamW in 32 bit on batches of `rows` rows, and its
# loss is `y.square().mean()`. Write `peak_bytes(layers, hidden, rows)`: the highest memory in
# the second step, in bytes. The checks ask a virtual A100, whose cuBLAS has 2 workspaces of
# 8.125 MiB. You need not count biases. Of what one operation needs for itself, count only the
# roots of AdamW's step.

# %%
# given
import torch.nn.functional as F


class MLPBlock(nn.Module):
    """(rows, hidden) → the same."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


# %%
print(f"{measured(16, 1024, 1024):,} bytes")


# %%
# answer: peak_bytes
def peak_bytes(layers, hidden, rows):
    """The peak of a training step, in bytes."""
    ### BEGIN SOLUTION
    weights = 4 * layers * 8 * hidden**2
    always = 3 * weights + 2 * 8.125 * 2**20  # weights, two numbers of AdamW, cuBLAS
    kept = layers * (4 + 4 + 16 + 16) * rows * hidden  # inputs of norm, up, GELU and down
    of_loss = 4 * 4 * rows * hidden  # the batch, its output, two gradients
    step = 2 * weights  # gradients, and a root of each weight's second moment
    return always + max(kept + of_loss, step)
    ### END SOLUTION


# %%
with exercise.check("peak_bytes", "many rows", points=3) as student:
    peak = measured(16, 1024, 65_536)
    student.close_to(
        student.call("peak_bytes", 16, 1024, 65_536) / peak,
        1.0,
        "65,536 rows: the prediction ÷ the peak is 1 within 0.05",
        atol=0.05,
    )

# %%
with exercise.check("peak_bytes", "few rows", points=2) as student:
    peak = measured(16, 1024, 64)
    student.close_to(
        student.call("peak_bytes", 16, 1024, 64) / peak,
        1.0,
        "64 rows: the prediction ÷ the peak is 1 within 0.05",
        atol=0.05,
    )

# %%
with exercise.check("peak_bytes", "other sizes", points=3, hidden=True) as student:
    for rows in (256, 2_048, 131_072):
        layers, hidden = student.random.randint(12, 24), 128 * student.random.randint(8, 16)
        peak = measured(layers, hidden, rows)
        student.close_to(
            student.call("peak_bytes", layers, hidden, rows) / peak,
            1.0,
            "another size: the prediction ÷ the peak is 1 within 0.05",
            atol=0.05,
        )

# %% [markdown]
# ## 3. A checkpointed block (8 points)
# Write `Checkpoint`, whose `apply(block, x)` returns `block(x)`, keeps `x` alone, and computes
# the block again in backward. The gradients of `x` and of the block's weights are those of the
# plain block, *also if the block draws random numbers*, as dropout does.


# %%
# given
class Drops(nn.Module):
    """A linear layer, tanh, and dropout with probability `drop`."""

    def __init__(self, drop):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = drop

    def forward(self, x):
        return F.dropout(torch.tanh(self.linear(x)), self.drop)


def gradients(x, drop, checkpointed):
    """Gradients of x, weight and bias, and for each forward whether autograd recorded it."""
    torch.manual_seed(0)
    block, modes = Drops(drop), []
    block.register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = Checkpoint.apply(block, x) if checkpointed else block(x)
    torch.rand(3)  # the program goes on, and draws
    y.square().sum().backward()
    computed = [x.grad, *(weight.grad for weight in block.parameters())]
    return [None if gradient is None else gradient.tolist() for gradient in computed], modes


# %%
# answer: checkpoint
class Checkpoint(torch.autograd.Function):
    """block(x), of which only x is kept."""

    @staticmethod
    def forward(ctx, block, x):
        ### BEGIN SOLUTION
        ctx.block = block
        ctx.random = torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            again = ctx.block(x)
        torch.set_rng_state(now)
        again.backward(gradient)
        return None, x.grad
        ### END SOLUTION


# %%
with exercise.check("checkpoint", "gradients", points=3) as student:
    x = torch.randn(4, 6, generator=student.generator)
    plain, _ = gradients(x, 0.0, False)
    found, _ = student.call("gradients", x, 0.0, True)
    student.close_to(found, plain, "the gradients of x, weight and bias", atol=1e-6)

# %%
with exercise.check("checkpoint", "computed twice", points=2) as student:
    x = torch.randn(4, 6, generator=student.generator)
    plain, _ = gradients(x, 0.0, False)
    found, modes = student.call("gradients", x, 0.0, True)
    student.close_to(found, plain, "the gradients of x, weight and bias", atol=1e-6)
    student.equal(modes, [False, True], "the first forward is not recorded, the second one is")

# %%
with exercise.check("checkpoint", "random numbers", points=3, hidden=True) as student:
    x = torch.randn(4, 6, generator=student.generator)
    plain, _ = gradients(x, 0.5, False)
    found, _ = student.call("gradients", x, 0.5, True)
    student.close_to(found, plain, "the gradients with dropout", atol=1e-6)

# %%
exercise.summary()
