# %% [markdown]
# # Exercises: model and data parallel together
# 40 minutes, 20 points. You need the notebook of lesson 06.
#
# Run the next cell first. Then each question has a cell for your answer and checks below it.
# The checks run your answer in a process of its own, so everything that it needs (imports,
# helpers) stands in its cell. A verdict begins with `right` or `wrong`. When your work is
# graded, hidden checks try other numbers.
#
# Your functions return plans: groups of ranks, devices, a layout. The checks execute them, on
# virtual GPUs where memory or time counts.

# %% jupyter={"source_hidden": true}
# setup
import itertools

import torch

import multigpu
from multigpu.exercise import Exercise
from multigpu.models import CNN

GIB = 2**30
exercise = Exercise("06-hybrid-parallel")

# %% [markdown]
# ## 1. Predict: four nodes (2 points)
# The lesson's large model has 1.1 billion weights; its larger stage has 564 million, with 4
# bytes each. On two nodes with 10 Gb/s Ethernet (1.25 GB/s, one adapter per node), the
# all-reduce of the larger stage's gradients ends last, after 3.6 s. (The lesson computes 3.5 s
# for the gradients of both stages together, at the adapter's full speed.)
#
# Now there are four nodes with two GPUs each, and four replicas of two stages, a replica on
# each node. How many seconds does the all-reduce take? Write your prediction before you run
# the check, which simulates it.

# %%
# answer: guess_allreduce
guess_allreduce = None  # seconds
### BEGIN SOLUTION
# A ring of n twins sends 2 (n - 1)/n of the bytes; two GPUs share a node's adapter.
guess_allreduce = 2 * 3 / 4 * 4 * 564e6 / (1.25e9 / 2)
### END SOLUTION


# %% jupyter={"source_hidden": true}
# setup
def allreduce_seconds(nodes: int) -> float:
    """The simulated seconds of the slowest all-reduce of the large model's gradients."""
    with torch.device("meta"):
        model = CNN((1, 28, 28), hidden=90_000, classes=6_000)
    first = sum(weight.nbytes for weight in model.parameters())
    last = sum(weight.nbytes for weight in model.fc2.parameters())
    inside, between = multigpu.LINKS["NVLink2"], multigpu.NETWORKS["Ethernet10"]
    network = multigpu.Network(inside, between, gpus_per_node=2)
    twins = network.group(range(0, 2 * nodes, 2))
    return max(
        multigpu.collective_seconds("allreduce", size, twins) for size in (first - last, last)
    )


# %% jupyter={"source_hidden": true}
with exercise.check("guess_allreduce", "four nodes", points=2) as student:
    seconds = allreduce_seconds(nodes=4)
    student.guess(
        "guess_allreduce",
        seconds,
        "the prediction is within 10% of the simulated seconds",
        "how many bytes does a GPU of a ring of four send, and who shares its adapter?",
        within=0.1 * seconds,
        unit="seconds",
    )

# %% [markdown]
# ## 2. Write: who talks to whom? (5 points)
# Several replicas of a pipeline run with one GPU per rank. Ranks are numbered node by node,
# and a node has as many GPUs as a pipeline has stages. So that activations stay inside a node,
# replica i has the ranks from i × stages on, in the order of its stages.
#
# Write `groups(ranks, stages)`. It returns two lists of groups, a group is a list of ranks:
# - the pipelines: the ranks of each replica, in the order in which activations pass them;
# - the twins: the ranks that average their gradients with each other.
#
# On a cluster, every rank passes each of these groups to `dist.new_group`, also those that it
# is not in: all ranks must make the same calls in the same order. That is why the function
# does not know its own rank. What a person sees whose groups are wrong: the all-reduce hangs,
# or fails because the gradients have different shapes; or it averages the weights of different
# layers.


# %% jupyter={"source_hidden": true}
# setup
def check_groups(student, ranks: int, stages: int) -> None:
    """Execute a step with the groups: send activations along pipelines, average gradients."""
    pipelines, twins = student.call("groups", ranks, stages)
    everyone = list(range(ranks))
    for name, lists in (("a pipeline", pipelines), ("a group of twins", twins)):
        members = [rank for group in lists for rank in group]
        valid = all(type(rank) is int for rank in members) and sorted(members) == everyone
        if not student.expect(
            valid, f"each rank is in {name}, and in one only", f"the groups are {lists!r}"
        ):
            return

    numbers = [rank % stages for rank in everyone]  # of each rank's stage
    passed = [[numbers[rank] for rank in group] for group in pipelines]
    student.expect(
        all(stage == list(range(stages)) for stage in passed),
        "activations pass all stages of the model in order",
        f"the stages that they pass are {passed}",
    )
    crossing = [group for group in pipelines if len({rank // stages for rank in group}) > 1]
    student.expect(
        not crossing, "activations stay inside a node", f"these cross nodes: {crossing}"
    )

    # The weights of stage s have the shape (s + 1,).
    gradients = [torch.rand(n + 1, generator=student.generator) for n in numbers]
    means = {}
    for group in twins:
        of_group = [gradients[rank] for rank in group]
        shapes = [tuple(gradient.shape) for gradient in of_group]
        if len(set(shapes)) > 1:
            student.expect(
                False,
                "twins hold the same weights",
                f"the all-reduce of ranks {group} gets gradients of the shapes {shapes}",
            )
            return
        means |= dict.fromkeys(group, torch.stack(of_group).mean(0))
    student.expect(True, "twins hold the same weights")
    of_stage = {n: [each for each in gradients if len(each) == n + 1] for n in numbers}
    expected = [torch.stack(of_stage[n]).mean(0) for n in numbers]
    student.close_to(
        [means[rank] for rank in everyone],
        expected,
        "each rank has the mean gradient of all replicas",
    )


# %%
# answer: groups
def groups(ranks, stages):
    """Two lists of groups of ranks: the pipelines, and the twins."""
    ### BEGIN SOLUTION
    pipelines = [list(range(first, first + stages)) for first in range(0, ranks, stages)]
    twins = [list(range(stage, ranks, stages)) for stage in range(stages)]
    return pipelines, twins
    ### END SOLUTION


# %%
with exercise.check("groups", "4 ranks, 2 stages", points=2) as student:
    check_groups(student, ranks=4, stages=2)

# %%
with exercise.check("groups", "other numbers", points=3, hidden=True) as student:
    stages = student.random.randint(3, 5)
    check_groups(student, stages * student.random.randint(3, 4), stages)

# %% [markdown]
# ## 3. Find the bug: out of memory, beside an idle GPU (4 points)
# Each rank of a node takes as many GPUs as its replica has stages. `broken_devices_of` worked
# with one rank on each node. With two ranks of two stages on nodes with four GPUs, the job
# ends with `CUDA out of memory` on GPU 1, and `nvidia-smi` shows that GPU 3 does nothing.
#
# Write `devices_of(local_rank, stages)` without the bug. It returns the names of the rank's
# GPUs in the order of its stages, for example `["cuda:0", "cuda:1"]`. Each GPU has memory for
# one stage. `place` does on virtual GPUs what the ranks of a node do.


# %%
# given
def broken_devices_of(local_rank, stages):
    """The names of the rank's GPUs, in the order of its stages."""
    return [f"cuda:{local_rank + stage}" for stage in range(stages)]


# %% jupyter={"source_hidden": true}
# setup
def place(devices_of_ranks: list[list[str]]) -> tuple[str, list[int]]:
    """Place the stages of a node's ranks on its GPUs, which have memory for one stage each.

    Returns the first error or "", and the GPUs on which nothing was placed.
    """
    count = sum(len(devices) for devices in devices_of_ranks)
    errors, placed = [], []
    with multigpu.gpus(count, memory="16GiB", shapes_only=True) as gpus:
        for device in itertools.chain(*devices_of_ranks):
            try:
                placed.append(torch.empty(10 * GIB, dtype=torch.uint8, device=device))
            except RuntimeError as error:
                text = str(error).replace("\n", ". ")
                errors.append(". ".join(text.split(". ")[:3]))
        idle = [gpu.index for gpu in gpus if not torch.cuda.memory_allocated(gpu)]
    return "".join(errors[:1]), idle


def check_devices(student, cases: list[tuple[int, int]]) -> None:
    """The verdicts for some (ranks of a node, stages)."""
    errors, strange = [], []
    for ranks, stages in cases:
        rows = [student.call("devices_of", rank, stages) for rank in range(ranks)]
        names = [name for row in rows for name in row]
        known = {f"cuda:{index}" for index in range(128)}
        if not known.issuperset(names) or {len(row) for row in rows} != {stages}:
            strange.append(f"ranks {ranks}, stages {stages}: {rows}")
            continue
        error, idle = place(rows)
        if error:
            errors.append(f"ranks {ranks}, stages {stages}, idle GPUs {idle}: {error}")
    student.expect(
        not strange, "each rank has a GPU's name for each stage", "; ".join(strange)
    )
    student.expect(not errors, "each stage fits on its GPU", "; ".join(errors))


# %%
# answer: devices_of
def devices_of(local_rank, stages):
    """The names of the rank's GPUs, in the order of its stages."""
    ### BEGIN SOLUTION
    first = local_rank * stages
    return [f"cuda:{first + stage}" for stage in range(stages)]
    ### END SOLUTION


# %%
# The symptom:
place([broken_devices_of(local_rank, stages=2) for local_rank in range(2)])

# %%
with exercise.check("devices_of", "two stages", points=2) as student:
    check_devices(student, [(1, 2), (2, 2)])

# %%
with exercise.check("devices_of", "other numbers", points=2, hidden=True) as student:
    few, more = student.random.sample([1, 3, 4], 2)
    check_devices(student, [(2, few), (3, more), (4, 2)])

# %% [markdown]
# ## 4. Write: which layout? (9 points)
# Four GPUs are to train a model: GPUs 0 and 1 are on one node, 2 and 3 on another. Write
# `layout(weights, activations, memory, links)`. It gets numbers of bytes:
# - `weights[i]`: the weights of layer i;
# - `activations[i]`: the outputs of layer i for all images of a step, over all replicas;
# - `memory`: of one GPU;
# - `links = (inside, between)`: the bytes per second between the GPUs of a node in each
#   direction, and of a node's network adapter.
#
# It returns a pair: the GPUs of each replica, and the cut. `[[0, 1], [2, 3]], 2` are two
# replicas of two stages inside nodes, with layers 0 and 1 in the first stage and all others in
# the second. `[[0, 2], [1, 3]], 2` is the same with stages across nodes. `[[0], [1], [2],
# [3]], None` are four replicas with one stage.
#
# Which layout is wanted:
# 1. No GPU may run out of memory. For its layers, a GPU holds four times the weights (with the
#    gradients and Adam's two numbers) and the activations of its replica's images, which is a
#    fourth of them with four replicas and a half with two. A second stage also holds the
#    activations that it receives. If nothing fits, return None.
# 2. Of the layouts that fit, those with fewer stages are better.
# 3. Of those, the one whose messages take less time: the activations at the cut and back their
#    gradients, then the all-reduce. In an all-reduce of two twins, each of them sends as many
#    bytes as its stage has weights; the larger stage takes longer. Between nodes, the two GPUs
#    of a node share the adapter, and each has half of `between`.
#
# `run_layout` executes a layout on virtual GPUs.

# %% jupyter={"source_hidden": true}
# setup
REPLICAS = [[0], [1], [2], [3]]
INSIDE = [[0, 1], [2, 3]]
ACROSS = [[0, 2], [1, 3]]


def run_layout(
    plan: tuple[list[list[int]], int | None],
    weights: list[int],
    activations: list[int],
    memory: int,
    links: tuple[float, float],
) -> tuple[str, float]:
    """Execute a layout: its error or "", and the seconds of its messages."""
    gpus, cut = plan
    layers = range(len(weights))
    stages = [layers] if len(gpus[0]) == 1 else [layers[:cut], layers[cut:]]
    link = multigpu.Link("inside", links[0], latency=0.0)
    network = multigpu.Link("between", links[1], latency=0.0, adapter="node")
    nodes = {"link": link, "between_nodes": network, "gpus_per_node": 2, "shapes_only": True}

    def tensor(size: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    with multigpu.gpus(4, memory=memory, **nodes) as devices:
        held = []
        try:
            for replica in gpus:
                for gpu, stage in zip(replica, stages, strict=True):
                    sizes = [4 * weights[i] + activations[i] // len(gpus) for i in stage]
                    if stage is not stages[0]:
                        sizes.append(activations[cut - 1] // len(gpus))
                    held += [tensor(size, devices[gpu]) for size in sizes]
        except torch.OutOfMemoryError as error:
            return ". ".join(str(error).split(". ")[:3]), 0.0

    with multigpu.gpus(4, memory=1024 * GIB, **nodes) as devices:
        if len(stages) == 2:
            size = activations[cut - 1] // len(gpus)
            sent = [tensor(size, devices[first]) for first, _ in gpus]
            sent = [x.to(devices[last]) for x, (_, last) in zip(sent, gpus, strict=True)]
            sent = [x.to(devices[first]) for x, (first, _) in zip(sent, gpus, strict=True)]
        seconds = multigpu.elapsed()
    network = multigpu.Network(link, network, 2)
    allreduces = [
        multigpu.collective_seconds(
            "allreduce", sum(weights[i] for i in stage), network.group(twins)
        )
        for stage, twins in zip(stages, zip(*gpus, strict=True), strict=True)
    ]
    return "", seconds + max(allreduces)


VERDICTS = (
    "each plan is one of the layouts",
    "no GPU runs out of memory",
    "no plan has more stages than the memory needs",
    "no other layout has faster messages",
)


def find_faults(words: str, case: tuple, plan: object) -> dict[str, str]:
    """What is wrong with the student's plan for a case: a verdict of VERDICTS → the reason."""
    layers = len(case[0])
    cuts = range(1, layers)
    plans = [(REPLICAS, None), *((gpus, cut) for gpus in (INSIDE, ACROSS) for cut in cuts)]
    known = any(plan in (tuple(other), list(other)) for other in plans) or (
        isinstance(plan, tuple | list) and len(plan) == 2 and plan[0] == REPLICAS
    )
    if not known:
        return {VERDICTS[0]: f"{words}: it is {plan!r}"}
    error, seconds = run_layout(plan, *case)
    if error:
        return {VERDICTS[1]: f"{words}: {error}"}
    ran = [(len(other[0][0]), *run_layout(other, *case)) for other in plans]
    stages, least = min((stages, seconds) for stages, error, seconds in ran if not error)
    if len(plan[0][0]) != stages:
        return {VERDICTS[2]: f"{words}: with {stages} it fits, too"}
    if seconds > 1.001 * least:
        text = f"{words}: its messages take {seconds:.3g} s, and {least:.3g} s are possible"
        return {VERDICTS[3]: text}
    return {}


def check_layouts(student, cases: dict[str, tuple]) -> None:
    """The verdicts on the student's layouts for some cases: the arguments of `layout`."""
    plans = {words: student.call("layout", *case) for words, case in cases.items()}
    faults = [find_faults(words, case, plans[words]) for words, case in cases.items()]
    for verdict in VERDICTS:
        reasons = [fault[verdict] for fault in faults if verdict in fault]
        if not student.expect(not reasons, verdict, "; ".join(reasons)):
            return


# %%
# answer: layout
def layout(weights, activations, memory, links):
    """(the GPUs of each replica, the cut), or None."""
    ### BEGIN SOLUTION
    inside, between = links
    if 4 * sum(weights) + sum(activations) / 4 <= memory:
        return [[0], [1], [2], [3]], None
    best = None
    for cut in range(1, len(weights)):
        first = 4 * sum(weights[:cut]) + sum(activations[:cut]) / 2
        second = 4 * sum(weights[cut:]) + sum(activations[cut - 1 :]) / 2
        if max(first, second) > memory:
            continue
        gradients = max(sum(weights[:cut]), sum(weights[cut:]))
        sent = 2 * activations[cut - 1] / 2
        for gpus, seconds in (
            ([[0, 1], [2, 3]], sent / inside + gradients / (between / 2)),
            ([[0, 2], [1, 3]], sent / (between / 2) + gradients / inside),
        ):
            if best is None or seconds < best[0]:
                best = seconds, (gpus, cut)
    return best and best[1]
    ### END SOLUTION


# %%
# Try layouts here: four layers of 1 GiB, 2 GiB of activations each, 16 GiB of memory.
run_layout(([[0, 1], [2, 3]], 1), 4 * [GIB], 4 * [2 * GIB], 16 * GIB, (150e9, 1.25e9))

# %%
with exercise.check("layout", "one stage or two", points=2) as student:
    small = ([GIB] * 4, [4 * GIB] * 4)
    sizes = {f"{size} GiB": (*small, size * GIB, (150e9, 1.25e9)) for size in (24, 18)}
    check_layouts(student, sizes)

# %%
with exercise.check("layout", "inside or across", points=2) as student:
    weights = [GIB] * 4
    few = [GIB // 2, GIB // 4, GIB // 2, GIB // 2]
    many = [12 * size for size in few]
    cases = {
        "few activations": (weights, few, 14 * GIB, (150e9, 1.25e9)),
        "many activations": (weights, many, 18 * GIB, (150e9, 1.25e9)),
    }
    check_layouts(student, cases)

# %%
with exercise.check("layout", "other models and networks", points=2, hidden=True) as student:
    size = student.random.randint(3, 6) * GIB // 4
    links = (student.random.choice([150e9, 450e9]), student.random.choice([1.25e9, 3.125e9]))
    # The gradients decide: equal stages are best, although less is sent at another cut.
    many = [student.random.randint(20, 24) * size // 4 for _ in range(6)]
    many[1] = 4 * size
    # The activations decide: unequal stages are best.
    few = [size, size, size, size, size // 4, size]
    cases = {
        "many activations": ([size] * 6, many, 31 * size, links),
        "few activations": ([size] * 6, few, 24 * size, links),
    }
    check_layouts(student, cases)

# %%
with exercise.check("layout", "unequal stages", points=2, hidden=True) as student:
    size = student.random.randint(4, 8) * GIB // 2
    weights = [size] * 4
    links = (150e9, 3.125e9)
    early = [3 * size, 3 * size, size // 2, size]
    late = [size, 4 * size, 4 * size, 2 * size]
    cases = {
        "the fullest GPU": (weights, early, 15 * size, links),
        "what is received": (weights, late, 69 * size // 4, links),
    }
    check_layouts(student, cases)

# %%
with exercise.check("layout", "nothing fits", points=1, hidden=True) as student:
    size = student.random.randint(2, 8) * GIB
    plan = student.call("layout", [size] * 4, [GIB] * 4, 7 * size, (150e9, 25e9))
    student.expect(plan is None, "nothing fits, and it says so", f"it is {plan!r}")
    case = ([size] * 4, [GIB] * 4, 40 * size, (150e9, 25e9))
    faults = find_faults("40 times as much as a layer", case, student.call("layout", *case))
    reasons = [faults[verdict] for verdict in VERDICTS[:2] if verdict in faults]
    student.expect(not reasons, "with more memory something fits", "; ".join(reasons))

# %%
exercise.summary()
