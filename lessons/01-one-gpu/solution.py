# %% [markdown]
# # Exercises: one GPU first
# 30 minutes, 20 points, after the notebook PT_CNN_SingleGPU. You need no GPU. Run the cells
# from top to bottom. Write each answer in its own cell, below the line `# answer: …`, which
# must stay, with the imports and helpers that it needs; then run the checks below it. They say
# what is wrong. Hidden checks try other values when your notebook is graded.

# %%
# setup
from multigpu.exercise import Exercise

# These imports are ones that virtual GPUs, and the first operation on them, need.
exercise = Exercise(
    "01-one-gpu", imports=("multigpu.virtual.face", "torch.distributed.tensor")
)

# %% [markdown]
# ## The device of questions 1 and 2
# `execute` simulates a device with a queue, and the host's clock. It takes a *plan*, a list of
# words that say what the host does:
# - `"read"` reads the host's clock;
# - `"synchronize"` waits until the queue is empty;
# - any other word is the name of an operation, and launches it: 0.01 ms on the host.
#
# It returns what the clock shows at each `"read"`, in ms.

# %%
# given
from collections import Counter


def execute(plan, milliseconds, busy=0.0):
    """The host's clock at each "read" of the plan, in ms.

    milliseconds   {operation: [ms on the device, one for each launch]}
    busy           ms of operations that are in the queue at the beginning
    """
    clock = 0.0
    queue_empty_at = busy
    launched = Counter()
    readings = []
    for word in plan:
        if word == "read":
            readings.append(clock)
        elif word == "synchronize":
            clock = max(clock, queue_empty_at)
        elif launched[word] == len(milliseconds.get(word, [])):
            raise ValueError(f"the plan launches {word!r} more often than the task says")
        else:
            clock += 0.01
            queue_empty_at = max(queue_empty_at, clock) + milliseconds[word][launched[word]]
            launched[word] += 1
    missing = [word for word, each in milliseconds.items() if launched[word] < len(each)]
    if missing:
        raise ValueError(f"the plan launches {missing[0]!r} too few times")
    return readings


# %%
step = ["read", "forward", "read", "backward", "read", "update", "read"]
execute(step, {"forward": [20], "backward": [40], "update": [10]})

# %% [markdown]
# ## 1. The loss is printed in each step (2 points)
# The device needs 20 ms for forward, 40 ms for backward and 10 ms for the update. After
# forward the program calls `loss.item()`, which waits for the queue. Nothing else waits. The
# program reads the clock before each part and after the last one. What does the clock show for
# forward and for backward in the **second** step? Predict two numbers, in ms.

# %%
# answer: guess_forward
guess_forward = None  # ms that the clock shows for forward in the second step
guess_backward = None  # ms that it shows for backward in the second step
### BEGIN SOLUTION
guess_forward = 70
guess_backward = 0
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_forward", "forward", points=1) as student:
    with_item = ["read", "forward", "synchronize", "read", "backward", "read", "update"]
    times = {"forward": [20, 20], "backward": [40, 40], "update": [10, 10]}
    shown = execute(2 * with_item, times)
    student.guess(
        "guess_forward",
        shown[4] - shown[3],
        "the clock shows this for forward, within 2 ms",
        "in which part does the CPU wait for the device?",
        within=2,
        unit="ms",
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_forward", "backward", points=1) as student:
    with_item = ["read", "forward", "synchronize", "read", "backward", "read", "update"]
    times = {"forward": [20, 20], "backward": [40, 40], "update": [10, 10]}
    shown = execute(2 * with_item, times)
    student.guess(
        "guess_backward",
        shown[5] - shown[4],
        "the clock shows this for backward, within 2 ms",
        "in which part does the CPU wait for the device?",
        within=2,
        unit="ms",
    )

# %% [markdown]
# ## 2. A clock that can be trusted (8 points)
# Write two functions that measure how long the device takes for each part of a step.
#
# - `plan(parts, warm_up, steps)` returns the plan of `warm_up + steps` steps. `parts` are the
#   names of a step's operations, in their order.
# - `part_ms(parts, warm_up, steps, readings)` gets what the clock showed at the reads of your
#   plan. It returns {part: ms}. The first `warm_up` steps do not count. In a few of the other
#   steps another program uses the device, too: return the time of an ordinary step.
#
# Before the first step, the queue may hold operations of another program. The checks execute
# your plan. If forward takes 0.01 ms, the clock has shown the launch; if the last part takes
# as long as all of them, the plan waits too rarely.


# %%
# answer: timing
def plan(parts, warm_up, steps):
    """The words for `execute`."""
    ### BEGIN SOLUTION
    step = []
    for part in parts:
        step += [part, "synchronize", "read"]
    return ["synchronize", "read"] + (warm_up + steps) * step
    ### END SOLUTION


def part_ms(parts, warm_up, steps, readings):
    """{part: ms of the device in an ordinary step}."""
    ### BEGIN SOLUTION
    from itertools import pairwise
    from statistics import median

    durations = [end - begin for begin, end in pairwise(readings)]
    counted = durations[warm_up * len(parts) :]
    return {part: median(counted[place :: len(parts)]) for place, part in enumerate(parts)}
    ### END SOLUTION


# %% [markdown]
# Try it: the device's times are 20, 40 and 10 ms.

# %%
parts = ["forward", "backward", "update"]
times = {"forward": [20], "backward": [40], "update": [10]}
try:
    print(part_ms(parts, 0, 1, execute(plan(parts, 0, 1), times)))
except NotImplementedError:
    print("no answer yet: write plan and part_ms first")

# %%
with exercise.check("timing", "one step", points=1) as student:
    parts = ["forward", "backward", "update"]
    words = student.call("plan", parts, 0, 1)
    readings = execute(words, {"forward": [20], "backward": [40], "update": [10]})
    student.close_to(
        student.call("part_ms", parts, 0, 1, readings),
        {"forward": 20, "backward": 40, "update": 10},
        "each part has the time of the device, within 0.1 ms",
        atol=0.1,
    )

# %%
with exercise.check("timing", "slow steps at the beginning", points=2) as student:
    parts = ["forward", "backward", "update"]
    times = {
        "forward": [300, 90, 90, 90, 20, 20, 20],
        "backward": [200, 80, 80, 80, 40, 40, 40],
        "update": [30, 30, 30, 30, 10, 10, 10],
    }
    readings = execute(student.call("plan", parts, 4, 3), times)
    student.close_to(
        student.call("part_ms", parts, 4, 3, readings),
        {"forward": 20, "backward": 40, "update": 10},
        "the warm-up steps do not count",
        atol=0.1,
    )

# %%
with exercise.check("timing", "another program", points=2) as student:
    parts = ["forward", "backward", "update"]
    warm_up = student.random.randint(1, 2)
    steps = student.random.choice([7, 9, 11])
    ordinary = {part: student.random.randint(5, 50) for part in parts}
    times = {part: [2 * ms] * warm_up + [ms] * steps for part, ms in ordinary.items()}
    for part in parts:
        for disturbed in student.random.sample(range(steps), 2):
            times[part][warm_up + disturbed] += 200
    readings = execute(student.call("plan", parts, warm_up, steps), times)
    student.close_to(
        student.call("part_ms", parts, warm_up, steps, readings),
        ordinary,
        "two disturbed steps do not change the result",
        atol=0.1,
    )

# %%
with exercise.check("timing", "a queue that is not empty", points=2) as student:
    parts = ["forward", "backward", "update"]
    ordinary = {part: student.random.randint(5, 50) for part in parts}
    times = {part: [ms] for part, ms in ordinary.items()}
    busy = student.random.randint(100, 200)
    readings = execute(student.call("plan", parts, 0, 1), times, busy)
    student.close_to(
        student.call("part_ms", parts, 0, 1, readings),
        ordinary,
        "work that was in the queue before does not count",
        atol=0.1,
    )

# %%
with exercise.check("timing", "other parts", points=1, hidden=True) as student:
    parts = ["copy", "forward", "loss", "backward", "update"]
    student.random.shuffle(parts)
    ordinary = {part: student.random.randint(5, 50) for part in parts}
    times = {part: [3 * ms, ms, ms] for part, ms in ordinary.items()}
    readings = execute(student.call("plan", parts, 1, 2), times)
    student.close_to(
        student.call("part_ms", parts, 1, 2, readings),
        ordinary,
        "each part has its own time, whatever the parts are",
        atol=0.1,
    )

# %% [markdown]
# ## 3. Amdahl's law, with workers (6 points)
# `parts` are the ms of a step on one GPU, without workers: `{"data": 20, "forward": 30,
# "backward": 60, "update": 10}`.
#
# - `amdahl(parts, n, workers=0)`: how many times as fast is a step on *n* GPUs, at most? Each
#   GPU computes its part of the batch, and each GPU updates all weights. Without workers, one
#   process reads, and then the GPUs work. With `workers`, as many batches are read at the same
#   time, while the GPUs work.
# - `gpus_needed(parts, times)`: the smallest number of GPUs, without workers, that makes a
#   step at least `times` as fast; `None` if no number is enough.
#
# A colleague divides by *n* all that runs on a GPU: 1.71 times as fast with two GPUs, for the
# parts above. The measurement says 1.6.


# %%
# answer: amdahl
def amdahl(parts, n, workers=0):
    """How many times as fast as one GPU without workers."""
    ### BEGIN SOLUTION
    gpus = (parts["forward"] + parts["backward"]) / n + parts["update"]
    step = max(parts["data"] / workers, gpus) if workers else parts["data"] + gpus
    return sum(parts.values()) / step
    ### END SOLUTION


def gpus_needed(parts, times):
    """The smallest number of GPUs that is enough, or None."""
    ### BEGIN SOLUTION
    stays = parts["data"] + parts["update"]
    if sum(parts.values()) / times <= stays:
        return None
    n = 1
    while amdahl(parts, n) < times:
        n += 1
    return n
    ### END SOLUTION


# %%
with exercise.check("amdahl", "two GPUs", points=1) as student:
    parts = {"data": 20, "forward": 30, "backward": 60, "update": 10}
    student.close_to(student.call("amdahl", parts, 2), 1.6, "two GPUs, no workers")
    student.close_to(student.call("amdahl", parts, 1), 1.0, "one GPU is as fast as one GPU")

# %%
with exercise.check("amdahl", "two GPUs and two workers", points=1) as student:
    parts = {"data": 120, "forward": 20, "backward": 40, "update": 10}
    student.close_to(
        student.call("amdahl", parts, 2, 2),
        190 / 60,
        "the workers read while the GPUs work, and reading takes longer",
    )

# %%
with exercise.check("amdahl", "how many GPUs", points=1) as student:
    parts = {"data": 20, "forward": 30, "backward": 60, "update": 10}
    student.equal(student.call("gpus_needed", parts, 2.2), 4, "GPUs to be 2.2 times as fast")

# %%
with exercise.check("amdahl", "other numbers", points=1, hidden=True) as student:
    draw = student.random.randint
    for workers in (0, draw(2, 4)):
        n = draw(3, 16)
        shared = n * draw(10, 20)
        forward = draw(1, shared - 1)
        alone = {"data": draw(1, 10), "update": draw(1, 10)}
        parts = alone | {"forward": forward, "backward": shared - forward}
        step = shared / n + alone["update"] + (0 if workers else alone["data"])
        case = "with workers" if workers else "without workers"
        student.close_to(
            student.call("amdahl", parts, n, workers),
            sum(parts.values()) / step,
            f"{case}: n GPUs share forward and backward, and nothing else",
        )

# %%
with exercise.check("amdahl", "no number is enough", points=2, hidden=True) as student:
    unit = student.random.randint(2, 9)
    parts = {"data": 3 * unit, "forward": 2 * unit, "backward": 6 * unit, "update": unit}
    student.equal(student.call("gpus_needed", parts, 2), 4, "GPUs to be twice as fast")
    for times in (4, 3, 100):
        student.expect(
            student.call("gpus_needed", parts, times) is None,
            f"no number of GPUs makes it {times} times as fast: the result is None",
            "the part that stays is 1/3 of the step: what can the rest become, at least?",
        )

# %% [markdown]
# ## 4. It works on the CPU (4 points)
# The program below trains on the CPU. On a GPU it stops with `Expected all tensors to be on
# the same device`. Here virtual GPUs take the place of real ones.

# %%
# given
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from multigpu.exercise import gate


@cache
def virtual_gpus():
    """Three virtual GPUs; the first call starts them."""
    import multigpu

    return multigpu.gpus(3, gpu="V100-16GB")


class BrokenScale(nn.Module):
    """Subtracts the mean of each column, and divides by its standard deviation."""

    def __init__(self, mean, deviation):
        super().__init__()
        self.mean = mean
        self.deviation = deviation

    def forward(self, rows):
        return (rows - self.mean) / self.deviation


def broken_train(model, batches, device):
    """Train with the batches, lists of rows and labels, on the device. Returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for rows, labels in batches:
        rows.to(device)
        labels.to(device)
        loss = F.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Classifier(nn.Module):
    """Two layers; a check sees on which device backward passes between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, rows):
        hidden = torch.tanh(self.first(rows))
        return self.last(gate(hidden, str(hidden.device)))


def new_model(scale):
    torch.manual_seed(0)
    return nn.Sequential(scale, Classifier())


def trained(mean, deviation, batches, place):
    """The losses of your `train` with your `Scale`, on GPU number `place`."""
    return train(new_model(Scale(mean, deviation)), batches, virtual_gpus()[place])


def batches_of(count, generator):
    rows = [1 + 0.5 * torch.randn(6, 3, generator=generator) for _ in range(count)]
    return [[each, torch.arange(6) % 4] for each in rows]


# %%
batches = batches_of(3, torch.Generator().manual_seed(0))
broken = new_model(BrokenScale(torch.full((3,), 1.0), torch.full((3,), 0.5)))
print("CPU:", broken_train(broken, batches, torch.device("cpu")))
try:
    gpu = virtual_gpus()[0]
    broken_train(broken.to(gpu), batches, gpu)
except RuntimeError as error:
    print("GPU:", error)

# %% [markdown]
# Copy the bodies of `BrokenScale` and `broken_train` into the next cell, into `Scale` and
# `train`, and mend them. `train(model, batches, device)` gets a model and batches that are on
# the CPU, and trains on `device`. `Scale(mean, deviation)` works on each device to which its
# model is moved; training does not change its mean and deviation. The losses must be those of
# the CPU.


# %%
# answer: train
class Scale(nn.Module):
    """Subtracts the mean of each column, and divides by its standard deviation."""

    def __init__(self, mean, deviation):
        ### BEGIN SOLUTION
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        ### END SOLUTION

    def forward(self, rows):
        ### BEGIN SOLUTION
        return (rows - self.mean) / self.deviation
        ### END SOLUTION


def train(model, batches, device):
    """Train with the batches, lists of rows and labels, on the device. Returns the losses."""
    ### BEGIN SOLUTION
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for rows, labels in batches:
        rows = rows.to(device)
        labels = labels.to(device)
        loss = F.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
    ### END SOLUTION


# %%
with exercise.check("train", "the losses", points=1) as student:
    mean, deviation = torch.tensor([0.9, 1.0, 1.1]), torch.tensor([0.4, 0.5, 0.6])
    batches = batches_of(3, student.generator)
    model = new_model(BrokenScale(mean, deviation))
    on_cpu = broken_train(model, batches, torch.device("cpu"))
    student.close_to(
        student.call("trained", mean, deviation, batches, 0),
        on_cpu,
        "the losses on a GPU are those of the CPU",
        rtol=1e-4,
    )

# %%
with exercise.check("train", "the device", points=1) as student:
    mean, deviation = torch.tensor([0.9, 1.0, 1.1]), torch.tensor([0.4, 0.5, 0.6])
    arguments = [mean, deviation, batches_of(2, student.generator), 0]
    run = student.ranks("trained", [arguments])
    student.equal(
        [device for _, device in run.events[0]],
        ["cuda:0"] * 2,
        "backward runs on the GPU, once for each batch",
    )
    student.expect(min(run.values[0]) > 0, "the losses are above 0")

# %%
with exercise.check("train", "another GPU", points=2, hidden=True) as student:
    mean, deviation = torch.rand(2, 3, generator=student.generator) + 1
    place = student.random.randint(1, 2)
    count = student.random.randint(2, 4)
    arguments = [mean, deviation, batches_of(count, student.generator), place]
    run = student.ranks("trained", [arguments])
    student.expect(
        [device for _, device in run.events[0]] == [f"cuda:{place}"] * count,
        "backward runs on the GPU that was given",
    )
    student.expect(min(run.values[0]) > 0, "the losses are above 0")

# %%
exercise.summary()
