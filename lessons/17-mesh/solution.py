# %% [markdown]
# # Exercises: meshes
# 45 minutes, 20 points, after the notebook PT_GPT_Mesh. You need no GPU. Run the cells from
# top to bottom. Write each answer in its own cell, below the line `# answer: …`, which must
# stay, with the imports and helpers that it needs; then run the checks below it. They say what
# is wrong. Hidden checks try other values when your notebook is graded.

# %% jupyter={"source_hidden": true}
# setup
import itertools
import math

import torch

import multigpu
from multigpu.exercise import Exercise

exercise = Exercise("17-mesh")


def expected_groups(rank, mesh):
    """The groups of a rank, from an array of all ranks."""
    ranks = torch.arange(math.prod(mesh.values())).view(*mesh.values())
    place = [index.item() for index in (ranks == rank).nonzero()[0]]
    return {
        name: ranks.movedim(i, -1)[(*place[:i], *place[i + 1 :])].tolist()
        for i, name in enumerate(mesh)
    }


def check_groups(student, mesh):
    """The verdict on the groups of all ranks of a mesh."""
    wrong = ""
    for rank in range(math.prod(mesh.values())):
        answer = student.call("groups", rank, mesh)
        if answer != expected_groups(rank, mesh):
            wrong = wrong or f"rank {rank} of {mesh} has the groups {answer}"
    student.expect(not wrong, "each rank has the groups of the mesh", wrong)


def case(gpus, link, between, memory, batch, weights=6_700_000_000, per_node=8):
    """A case of question 3, in plain numbers, and the names of its links."""
    inside, across = multigpu.LINKS[link], multigpu.NETWORKS[between]
    each = across.bandwidth / (per_node if across.adapter == "node" else 1)
    numbers = dict(gpus=gpus, per_node=per_node, memory=memory, batch=batch, weights=weights)
    numbers |= dict(blocks=32, hidden=4096, tokens=2048, flops=0.5 * 312e12)
    numbers |= dict(inside=inside.bandwidth, between=each)
    return numbers, (inside, across)


def needed(layout, numbers):
    """Bytes that a GPU needs, by the rule of question 3."""
    stages, shards, tensor = layout
    sequence = 34 * numbers["tokens"] * numbers["hidden"] * numbers["blocks"]
    return 16 * numbers["weights"] // (stages * shards * tensor) + sequence // tensor


def valid(layout, numbers):
    """Whether a layout fills the GPUs by the rules of question 3."""
    if type(layout) not in (list, tuple) or [type(size) for size in layout] != [int] * 3:
        return False
    stages, shards, tensor = layout
    return (
        min(layout) > 0
        and math.prod(layout) == numbers["gpus"]
        and tensor <= numbers["per_node"]
        and numbers["blocks"] % stages == 0
        and numbers["batch"] % shards == 0
        and numbers["batch"] // shards >= stages
    )


def simulated(layout, numbers, links):
    """Simulated seconds of a step of the last stage: what it computes, waits for and sends."""
    stages, shards, tensor = layout
    network = multigpu.Network(*links, gpus_per_node=numbers["per_node"])
    rows = numbers["batch"] // shards
    flops = 6 * numbers["weights"] * numbers["batch"] * numbers["tokens"]
    seconds = flops / numbers["gpus"] / numbers["flops"]
    if tensor > 1:
        size = 2 * numbers["tokens"] * numbers["hidden"]
        group = network.group(range(tensor))
        times = 4 * numbers["blocks"] // stages * rows
        seconds += times * multigpu.collective_seconds("allreduce", size, group)
    seconds *= 1 + (stages - 1) / rows
    if shards > 1:
        part = numbers["weights"] // (stages * tensor)
        group = network.group(range(0, shards * tensor, tensor))
        for kind, size in (("allgather", 2), ("allgather", 2), ("reduce_scatter", 4)):
            seconds += multigpu.collective_seconds(kind, size * part, group)
    return seconds


def all_layouts(numbers):
    """Every layout that fills the GPUs and fits."""
    sizes = [2**power for power in range(11)]
    every = (layout for layout in itertools.product(sizes, repeat=3) if valid(layout, numbers))
    return [layout for layout in every if needed(layout, numbers) <= numbers["memory"]]


def fits(layout, numbers):
    """Allocate what a GPU needs on a virtual one: "" or its error."""
    try:
        with multigpu.gpus(1, memory=numbers["memory"], shapes_only=True) as (gpu,):
            torch.empty(needed(layout, numbers), dtype=torch.uint8, device=gpu)
    except torch.OutOfMemoryError as error:
        return ". ".join(str(error).split(". ")[:2])
    return ""


def check_layouts(student, cases, clock):
    """The verdicts on some cases: fits, and with `clock` is fast."""
    short, slow = [], []
    for numbers, links in cases:
        answer = student.call("layout", numbers)
        named = f"{numbers['gpus']} GPUs with {numbers['memory']:,} bytes: {answer!r}"
        if not valid(answer, numbers):
            short.append(f"{named} does not follow the rules")
            continue
        error = fits(answer, numbers)
        if error:
            short.append(f"{named}: {error}")
            continue
        seconds = simulated(answer, numbers, links)
        best = min(simulated(other, numbers, links) for other in all_layouts(numbers))
        if seconds > 1.1 * best:
            slow.append(f"{named} takes {seconds:.2f} s, another one {best:.2f} s")
    student.expect(not short, "each layout follows the rules and fits", "; ".join(short))
    if clock:
        student.expect(
            not short and not slow, "no layout that fits is 10% faster", "; ".join(slow)
        )


# %% [markdown]
# ## 1. Predict (4 points)
# A mesh of 64 ranks has 2 stages, 2 copies, 4 shards and tensor 4. The model has 7 billion
# weights. A weight, its gradient and AdamW's two numbers have 4 bytes each.

# %%
# answer: guess_mesh
guess_partners = None  # with how many other ranks does a rank share a group?
guess_gigabytes = None  # of weights, gradients and AdamW's numbers on each rank, in 10⁹ bytes
### BEGIN SOLUTION
guess_partners = 1 + 1 + 3 + 3
guess_gigabytes = 16 * 7 / (2 * 4 * 4)
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_mesh", "partners", points=2) as student:
    student.guess(
        "guess_partners",
        8,
        "the ranks that a rank shares a group with",
        "how many others are on each of its four lines?",
        within=0,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_mesh", "gigabytes", points=2) as student:
    student.guess(
        "guess_gigabytes",
        3.5,
        "the gigabytes of a rank",
        "which of the four dimensions divide what a rank keeps?",
        within=0.1,
        unit="GB",
    )

# %% [markdown]
# ## 2. Write: who talks to whom? (8 points)
# `mesh` has the size of each dimension by its name, in the order of the dimensions. Ranks are
# numbered as in `init_device_mesh`: neighbours in the last dimension have neighbouring
# numbers. `groups(rank, mesh)` returns a dictionary: for each name the ranks that differ from
# this rank in this dimension alone, itself too, as a list in order.


# %%
# answer: groups
def groups(rank: int, mesh: dict) -> dict:
    """The rank's group in each dimension of the mesh."""
    ### BEGIN SOLUTION
    group_of, stride = {}, 1
    for name, size in reversed(mesh.items()):
        first = rank - rank // stride % size * stride
        group_of[name] = [first + index * stride for index in range(size)]
        stride *= size
    return {name: group_of[name] for name in mesh}
    ### END SOLUTION


# %%
with exercise.check("groups", "eight ranks", points=3) as student:
    check_groups(student, {"stages": 2, "shards": 2, "tensor": 2})

# %%
with exercise.check("groups", "other meshes", points=5, hidden=True) as student:
    sizes = student.random.sample([2, 3, 4, 5], 3)
    check_groups(student, dict(zip(("copies", "shards", "tensor"), sizes, strict=True)))
    check_groups(student, {"stages": 2, "copies": 1, "shards": sizes[0], "tensor": 3})

# %% [markdown]
# ## 3. Choose a layout within a memory (8 points)
# `layout(case)` returns `[stages, shards, tensor]` for a GPT. `case` has plain numbers:
# `gpus`, `per_node`, `memory` of a GPU in bytes, `batch` in sequences, `weights`, `blocks`,
# `hidden`, `tokens` of a sequence, `flops` that a GPU computes in a second, and the bytes a
# second of a GPU `inside` a node and `between` nodes.
#
# Rules: the three are powers of two, and their product is `gpus`; tensor is at most
# `per_node`; stages divide `blocks`, shards divide `batch`, and a micro-batch is one sequence:
# there are `batch / shards` of them, at least as many as stages. A GPU needs 16 × weights /
# (stages × shards × tensor) + 34 × tokens × hidden × blocks / tensor bytes.
#
# A step takes 6 × weights × batch × tokens / gpus FLOPs, and for each micro-batch 4
# all-reduces of 2 × tokens × hidden bytes over tensor in each block of the stage; all of this
# 1 + (stages − 1) / micro-batches times, for the bubble. On top, over shards: two all-gathers
# of the stage's weights in 2 bytes, divided by tensor, and one reduce-scatter in 4 bytes. What
# stages send to each other is not counted. The checks simulate the collectives. Of the layouts
# that fit, yours may be at most 10% slower than the fastest. For an estimate: an all-gather
# among n sends (n − 1) / n of the bytes over the slowest link, an all-reduce twice that. If
# shards are on several nodes, neighbours of a node share the work of a ring: its speed is that
# of min(per_node / tensor, shards) GPUs between nodes, but not above `inside`.


# %%
# answer: layout
def layout(case: dict) -> list:
    """The sizes of the fastest layout that fits: [stages, shards, tensor]."""
    ### BEGIN SOLUTION
    powers = [2**power for power in range(11)]
    best, fastest = None, None
    for stages in powers:
        for tensor in powers:
            shards = case["gpus"] // (stages * tensor)
            if shards < 1 or stages * shards * tensor != case["gpus"]:
                continue
            rows = case["batch"] // shards
            if tensor > case["per_node"] or case["blocks"] % stages:
                continue
            if case["batch"] % shards or rows < stages:
                continue
            sequence = 34 * case["tokens"] * case["hidden"] * case["blocks"]
            if 16 * case["weights"] // case["gpus"] + sequence // tensor > case["memory"]:
                continue
            seconds = 6 * case["weights"] * case["batch"] * case["tokens"]
            seconds /= case["gpus"] * case["flops"]
            size = 2 * case["tokens"] * case["hidden"]
            sums = 4 * case["blocks"] // stages * rows
            seconds += sums * 2 * (tensor - 1) / tensor * size / case["inside"]
            seconds *= 1 + (stages - 1) / rows
            each = case["per_node"] // tensor
            speed = case["inside"]
            if shards > each:
                speed = min(speed, case["between"] * min(each, shards))
            part = case["weights"] / (stages * tensor)
            seconds += 8 * part * (shards - 1) / shards / speed
            if fastest is None or seconds < fastest:
                best, fastest = [stages, shards, tensor], seconds
    return best
    ### END SOLUTION


# %%
with exercise.check("layout", "fits", points=2) as student:
    cases = [
        case(16, "NVLink3", "HDR200", 12 * 10**9, 128),
        case(64, "NVLink3", "HDR200", 6 * 10**9, 512),
    ]
    check_layouts(student, cases, clock=False)

# %%
with exercise.check("layout", "two networks", points=3) as student:
    cases = [
        case(64, "NVLink3", "HDR200", 40 * 10**9, 128),
        case(32, "NVLink3", "Ethernet10", 40 * 10**9, 128),
    ]
    check_layouts(student, cases, clock=True)

# %%
with exercise.check("layout", "other clusters", points=3, hidden=True) as student:
    few = student.random.choice([32, 64])
    cases = [
        case(128, "NVLink4", "NDR400", 8 * 10**9, 2 * 128),
        case(few, "NVLink2", "RoCE100", 12 * 10**9, 4 * few),
        case(256, "NVLink3", "Ethernet25", 20 * 10**9, 1024),
        case(16, "PCIe4", "HDR200", 60 * 10**9, 64),
    ]
    check_layouts(student, cases, clock=True)

# %%
exercise.summary()
