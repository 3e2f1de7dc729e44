# %% [markdown]
# # Exercises: model parallelism
# 40 minutes, 20 points. You need both notebooks of lesson 03.
#
# Run the next cell first. Then each question has a cell for your answer and checks below it.
# The checks run your answer in a process of its own, so everything that it needs (imports,
# helpers) stands in its cell. A verdict begins with `right` or `wrong`. When your work is
# graded, hidden checks try other numbers.
#
# Your functions return plans and predictions. The checks execute them on virtual GPUs, whose
# memory and time they meter.

# %% jupyter={"source_hidden": true}
# setup
import torch
import torch.nn.functional as F
from torch import nn

import multigpu
from multigpu.exercise import Exercise
from multigpu.models import CNN

MIB = 2**20
exercise = Exercise("03-model-parallel")

# %%
# given
from itertools import pairwise

# %% [markdown]
# ## 1. Predict: what crosses the link? (2 points)
# The lesson's wide CNN gets images of 28 × 28 pixels; conv1 has 16 output channels, conv2 has
# 32 and halves height and width. Now only conv1 is on the first GPU, and the other layers are
# on the second. A step has 320 images, a number has 4 bytes.
#
# How many MiB (2²⁰ bytes) go from one GPU to the other in a training step, in both directions
# together? Write your prediction before you run the check, which meters the step.

# %%
# answer: guess_transfer
guess_transfer = None  # MiB
### BEGIN SOLUTION
guess_transfer = 2 * 4 * 320 * 16 * 28 * 28 / 2**20  # activations, then their gradients
### END SOLUTION


# %% jupyter={"source_hidden": true}
# setup
def transferred(batch: int) -> float:
    """The MiB that a step sends between two GPUs, of which the first has only conv1."""
    # A transfer's seconds are its MiB.
    slow = multigpu.Link("1 MiB/s", bandwidth=MIB, latency=0.0)
    with multigpu.gpus(2, link=slow, shapes_only=True) as (first, second):
        model = CNN((1, 28, 28), hidden=320).to(second)
        model.conv1.to(first)
        images = torch.empty(batch, 1, 28, 28, device=first)
        labels = torch.empty(batch, dtype=torch.long, device=second)
        x = torch.tanh(model.conv1(images)).to(second)
        x = torch.tanh(model.conv2(x))
        x = torch.tanh(model.fc1(x.flatten(1)))
        F.cross_entropy(model.fc2(x), labels).backward()
        events = [event for event in multigpu.timeline().events if event.kind == "transfer"]
        return sum(event.end - event.start for event in events)


# %% jupyter={"source_hidden": true}
with exercise.check("guess_transfer", "320 images", points=2) as student:
    metered_mib = transferred(320)
    student.guess(
        "guess_transfer",
        metered_mib,
        "the prediction is within 5% of the metered bytes",
        "which tensors cross the link in forward, and which in backward? How large is each?",
        within=0.05 * metered_mib,
        unit="MiB",
    )

# %% [markdown]
# ## 2. Write: the peak of a step (7 points)
# Write `peak(widths, batch, optimizer)`. It predicts the bytes that one GPU needs at most in
# the *second* training step of a network of linear layers, with 4 bytes per number. `widths`
# has the number of inputs and each layer's number of outputs: `[784, 4096, 10]` is
# `Linear(784, 4096)`, `Tanh`, `Linear(4096, 10)`. `optimizer` is `"sgd"` (with momentum) or
# `"adam"`.
#
# What is in memory, and when:
# - always: the weights, the optimizer's state (one number per weight with momentum, two with
#   Adam), and the images;
# - forward keeps the output of each tanh, which is also the next layer's input;
# - backward goes from the last layer to the first. At a tanh, its output and the gradients
#   after and before it are in memory; its output is free after that. At a linear layer, the
#   gradient of its output is there, the gradient of its weights is added (and stays), and the
#   gradient of its input, which the first layer does not need;
# - `optimizer.step()`: all gradients are there. Adam takes one more number per weight
#   meanwhile.
#
# The peak can be at each of these moments. Compare your function with `metered`, below. The
# checks allow 2%, so you can leave out the loss.


# %% jupyter={"source_hidden": true}
# setup
def metered(widths: list[int], batch: int, optimizer: str) -> int:
    """The bytes at the peak of the second step, metered on a virtual GPU."""
    layers = [module for pair in pairwise(widths) for module in (nn.Linear(*pair), nn.Tanh())]
    with multigpu.gpus(1, gpu="H100-80GB", shapes_only=True) as (gpu,):
        # cuBLAS gets its workspaces, which stay. They are no part of the answer.
        nn.Linear(1, 1).to(gpu)(torch.empty(1, 1, device=gpu)).sum().backward()
        workspaces = torch.cuda.memory_allocated(gpu)
        model = nn.Sequential(*layers[:-1]).to(gpu)
        if optimizer == "adam":
            stepper = torch.optim.Adam(model.parameters())
        else:
            stepper = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        images = torch.empty(batch, widths[0], device=gpu)
        labels = torch.empty(batch, dtype=torch.long, device=gpu)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(gpu)
            stepper.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            stepper.step()
        return torch.cuda.max_memory_allocated(gpu) - workspaces


def check_peak(student, case: tuple, what: str, hint: str) -> None:
    """A verdict in MiB: is the answer within 2% of the metered peak?"""
    got = student.call("peak", *case)
    if isinstance(got, torch.Tensor) and got.ndim == 0:
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, int | float):
        student.expect(False, what, f"peak must return a number of bytes; it is {got!r:.60}")
        return
    expected = metered(*case)
    peaks = f"peak{case} gives {got / MIB:,.1f} MiB, metered are {expected / MIB:,.1f} MiB"
    student.expect(abs(got - expected) <= 0.02 * expected, what, f"{peaks}; {hint}")


# %%
# answer: peak
def peak(widths, batch, optimizer):
    """The bytes at the peak of the second training step."""
    ### BEGIN SOLUTION
    sizes = [(inputs + 1) * outputs for inputs, outputs in pairwise(widths)]
    weights = sum(sizes)
    state, temporary = {"sgd": (1, 0), "adam": (2, 1)}[optimizer]
    moments = [(2 + state + temporary) * weights + batch * widths[0]]
    last = len(sizes)
    for layer in range(last, 0, -1):
        # Layer i has widths[i] outputs. The gradients of the later layers are there.
        held = (1 + state) * weights + sum(sizes[layer:])
        if layer < last:
            moments.append(held + batch * (sum(widths[: layer + 1]) + 2 * widths[layer]))
        held += sizes[layer - 1] + batch * (sum(widths[:layer]) + widths[layer])
        moments.append(held + batch * widths[layer - 1] * (layer > 1))
    return 4 * max(moments)
    ### END SOLUTION


# %%
# Try your function here.
metered([256, 4096, 4096, 10], batch=8192, optimizer="sgd") / MIB

# %%
with exercise.check("peak", "SGD and a large batch", points=2) as student:
    check_peak(
        student,
        ([256, 4096, 4096, 10], 8192, "sgd"),
        "the peak, in backward, is predicted within 2%",
        "it is at the second tanh: which outputs does forward still keep, which gradients "
        "are there?",
    )

# %%
with exercise.check("peak", "Adam and a small batch", points=2) as student:
    check_peak(
        student,
        ([256, 4096, 4096, 10], 256, "adam"),
        "the peak, in Adam's step, is predicted within 2%",
        "it is in optimizer.step(): how many numbers are there for each weight then?",
    )

# %%
with exercise.check("peak", "images with many pixels", points=1, hidden=True) as student:
    pixels = 512 * student.random.randint(24, 32)
    check_peak(
        student,
        ([pixels, 1024, 1024, 10], 16384, "sgd"),
        "the images count, also in backward and for larger images",
        "at which moments are the images in memory?",
    )

# %%
with exercise.check("peak", "other numbers of layers", points=2, hidden=True) as student:
    for words, hidden, rows, optimizer in (
        ("four hidden layers and SGD", 4, 8192, "sgd"),
        ("one hidden layer and Adam", 1, 128, "adam"),
        ("three hidden layers and Adam", 3, 256, "adam"),
    ):
        inside = [256 * student.random.randint(6, 12) for _ in range(hidden)]
        check_peak(
            student,
            ([64, *inside, 10], rows + student.random.randint(0, 100), optimizer),
            f"with {words} the peak is predicted within 2%",
            "is each layer counted at each moment of the list?",
        )

# %% [markdown]
# ## 3. Write: the order of 1F1B (7 points)
# Write `order_1f1b(rank, stages, micro_batches)`. It returns the order of a rank as a text,
# such as `"F1 F2 B1 F3 B2 B3"`: F1 is the forward of micro-batch 1, B1 its backward. Rank 0
# has the first stage.
#
# In 1F1B a rank first takes some micro-batches forward. Then it alternates, one backward and
# one forward, and at the end it takes the rest backward. The last rank goes backward with each
# micro-batch at once. Each earlier rank is one micro-batch further ahead.
#
# `play` executes the orders of all ranks: a forward takes 1 slot, a backward 2, a message no
# time. It returns what each rank held at most, the slots of the whole step, and the rank that
# waits for ever, if one does. Try it with GPipe's order: each rank takes all micro-batches
# forward, then all backward.


# %% jupyter={"source_hidden": true}
# setup
def play(orders: list[str]) -> tuple[list[int], int, str]:
    """Execute the ranks' orders.

    Returns the most micro-batches that each rank held, the slots until all have ended, and ""
    or where the pipeline hangs.
    """
    left = [order.split() for order in orders]
    ended: dict[tuple[int, str], int] = {}  # (rank, action) → slot
    free_at = [0] * len(orders)
    held = [0] * len(orders)
    most = [0] * len(orders)

    def needs(rank: int, action: str) -> tuple[int, str] | None:
        """The rank and its action that sends what this action needs."""
        if action[0] == "F":
            return (rank - 1, action) if rank > 0 else None
        return (rank + 1, action) if rank + 1 < len(orders) else (rank, f"F{action[1:]}")

    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(left):
            while actions:
                before = needs(rank, actions[0])
                if before is not None and before not in ended:
                    break
                action = actions.pop(0)
                forward = action[0] == "F"
                start = max(free_at[rank], ended.get(before, 0))
                free_at[rank] = ended[rank, action] = start + (1 if forward else 2)
                held[rank] += 1 if forward else -1
                most[rank] = max(most[rank], held[rank])
                progress = True
    waits = [
        f"rank {rank} waits for ever at {rest[0]}" for rank, rest in enumerate(left) if rest
    ]
    return most, max(free_at), "; ".join(waits)


def check_orders(student, stages: int, micro_batches: int) -> None:
    """The verdicts on the orders of all ranks."""
    orders = [
        student.call("order_1f1b", rank, stages, micro_batches) for rank in range(stages)
    ]
    each = sorted(f"{kind}{n}" for kind in "FB" for n in range(1, micro_batches + 1))
    incomplete = [rank for rank in range(stages) if sorted(orders[rank].split()) != each]
    complete = student.expect(
        not incomplete,
        "each rank takes each micro-batch forward once and backward once",
        f"not so on rank {incomplete[0]}: {orders[incomplete[0]]!r}" if incomplete else "",
    )
    if not complete:
        return  # the other ranks would wait for it
    most, slots, hangs = play(orders)
    if not student.expect(not hangs, "the pipeline runs to its end", hangs):
        return
    student.expect(
        all(count <= stages - rank for rank, count in enumerate(most)),
        "rank r never holds more than (stages − r) micro-batches",
        f"by rank it is {most}: these activations would not fit",
    )
    formula = 3 * (micro_batches + stages - 1)
    student.expect(
        slots == formula,
        "the bubble is (stages − 1)/(micro-batches + stages − 1) of the time",
        f"the step takes {slots} slots in place of {formula}: a rank waits too often",
    )


# %%
# answer: order_1f1b
def order_1f1b(rank, stages, micro_batches):
    """The rank's order as a text, such as "F1 F2 B1 F3 B2 B3"."""
    ### BEGIN SOLUTION
    ahead = min(stages - rank, micro_batches)
    order = [f"F{n}" for n in range(1, ahead + 1)]
    for n in range(1, micro_batches + 1):
        order.append(f"B{n}")
        if n + ahead <= micro_batches:
            order.append(f"F{n + ahead}")
    return " ".join(order)
    ### END SOLUTION


# %%
# Try orders here.
play(["F1 F2 F3 F4 B1 B2 B3 B4"] * 2)

# %%
with exercise.check("order_1f1b", "2 ranks, 4 micro-batches", points=2) as student:
    check_orders(student, stages=2, micro_batches=4)

# %%
with exercise.check("order_1f1b", "4 ranks, 8 micro-batches", points=2) as student:
    check_orders(student, stages=4, micro_batches=8)

# %%
with exercise.check("order_1f1b", "other numbers", points=2, hidden=True) as student:
    stages = student.random.choice([3, 5, 6])
    check_orders(student, stages, stages + student.random.randint(2, 9))

# %%
with exercise.check("order_1f1b", "few micro-batches", points=1, hidden=True) as student:
    check_orders(student, stages=4, micro_batches=student.random.randint(2, 3))

# %% [markdown]
# ## 4. Find the bug: a forgotten `.to()` (4 points)
# A program puts layer i of a network on GPU `placement[i]`. `moves(placement)` tells it which
# tensors to move: item i is the GPU to which the input of layer i is moved before that layer,
# or None if it is there already. One more item at the end is the GPU to which the labels are
# moved. The images and the labels come from the host.
#
# `broken_moves` was tried with one GPU and worked. With the placement [0, 0, 1, 1], the step
# ends with `Expected all tensors to be on the same device`. Its author mended that, and then
# [1, 1, 0, 0] ended in the same way. Write `moves` without the bugs. `train_step` executes a
# plan on virtual GPUs.


# %%
# given
def broken_moves(placement):
    """The GPU to which each layer's input is moved, or None; then the labels' GPU."""
    plan = [placement[0]]
    for before, gpu in pairwise(placement):
        plan.append(gpu if gpu > before else None)
    return [*plan, placement[0]]


# %% jupyter={"source_hidden": true}
# setup
def train_step(placement: list[int], plan: list[int | None]) -> str:
    """The error of a training step that moves its tensors after the plan, or ""."""
    with multigpu.gpus(max(placement) + 1, shapes_only=True) as gpus:
        layers = [nn.Linear(64, 64).to(gpus[gpu]) for gpu in placement]
        x = torch.empty(32, 64)
        labels = torch.empty(32, dtype=torch.long)
        *moved, last = plan
        where = "layer 0"
        try:
            for i, (layer, gpu) in enumerate(zip(layers, moved, strict=True)):
                where = f"layer {i}"
                x = torch.tanh(layer(x if gpu is None else x.to(gpus[gpu])))
            where = "the loss"
            F.cross_entropy(x, labels if last is None else labels.to(gpus[last])).backward()
        except RuntimeError as error:
            return f"{where}: " + str(error).partition(" (when")[0]
    return ""


def check_moves(student, placements: list[list[int]]) -> None:
    """The verdict on the plans for some placements."""
    errors = []
    for placement in placements:
        if error := train_step(placement, student.call("moves", placement)):
            errors.append(f"{placement}: {error}")
    student.expect(
        not errors, "each layer and the loss have all tensors on one GPU", "; ".join(errors)
    )


# %%
# answer: moves
def moves(placement):
    """The GPU to which each layer's input is moved, or None; then the labels' GPU."""
    ### BEGIN SOLUTION
    plan = [placement[0]]
    for before, gpu in pairwise(placement):
        plan.append(gpu if gpu != before else None)
    return [*plan, placement[-1]]
    ### END SOLUTION


# %%
# The symptom:
train_step([0, 0, 1, 1], broken_moves([0, 0, 1, 1]))

# %%
with exercise.check("moves", "two GPUs", points=2) as student:
    check_moves(student, [[0, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0]])

# %%
with exercise.check("moves", "other placements", points=2, hidden=True) as student:
    placements = []
    for count in (3, 4):
        there = list(range(count))
        placements.append([*there, *reversed(there), *there[::2]])
        placements.append([*student.random.choices(there, k=6), 0, 2])
    check_moves(student, placements)

# %%
exercise.summary()
