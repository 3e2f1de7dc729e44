# %% [markdown]
# # Exercises: TensorFlow on several nodes
# 35 minutes, 20 points. Run the next cell first. No answer needs TensorFlow: what goes wrong
# on several nodes is the list of addresses, the reading, and the number of steps.
#
# Write each answer in its cell, which begins with `# answer:`, and run it. Then run the checks
# below it. A check calls your functions in a process of their own, which gets the cells that
# begin with `# given` and your answer, and nothing else: imports and helpers of an answer
# stand in its own cell. When you hand in the notebook, hidden checks try other values. The
# last cell adds up your points.

# %% jupyter={"source_hidden": true}
# setup
from itertools import chain
from json import loads

from multigpu import tf_config as config
from multigpu.errors import UserError
from multigpu.exercise import Exercise

exercise = Exercise("08-tf-multi-node")


def images_per_step(images, batch, workers, policy):
    """What each worker reads in each step, with a policy of auto-sharding.

    It reads an array as TensorFlow does: the lesson's notebook shows it on two workers.
    """
    size = batch // workers
    plans = []
    for worker in range(workers):
        read = [n for n in range(images) if policy == "OFF" or n % batch // size == worker]
        plans.append([read[start : start + size] for start in range(0, len(read), size)])
    return plans


def steps_until_one_waits(images, size):
    """How many steps the workers make together, if worker w reads images[w] images itself."""
    batches = [range(0, count, size) for count in images]
    return sum(1 for _ in zip(*batches, strict=False))


def addresses_and_ranks(texts):
    """(addresses, rank) of each text, or None and why TensorFlow does not understand it."""
    if any(type(text) is not str for text in texts):
        return None, "tf_config must return a text: json.dumps makes it"
    try:
        return [config.read(text) for text in texts], ""
    except UserError as error:
        return None, str(error)


# %% [markdown]
# ## 1. Who reads how much: predict (3 points)
# Two workers read 24 images in global batches of 8: each worker reads 4 images in a step. With
# the policy `AUTO`, an epoch has three steps, and a step sees 8 different images. Predict both
# numbers for the policy `OFF`.
#
# A third prediction: each worker has its own files, worker 0 1,000 images and worker 1 only
# 437. Each reads batches of 32 until its files end, and calls `strategy.run` with its own
# tensors. Each step ends with an all-reduce. How many steps do the two make together, before
# one of them waits for the other? (A distributed data set would give worker 1 empty shards.)

# %%
# answer: guess_reading
guess_steps = None  # steps in an epoch, OFF
guess_different = None  # different images in one step, both workers together, OFF
guess_together = None  # steps with 1,000 and 437 images in batches of 32
### BEGIN SOLUTION
guess_steps = 6
guess_different = 4
guess_together = 14
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_reading", "steps without sharding", points=1) as student:
    first, _ = images_per_step(24, 8, 2, "OFF")
    student.guess(
        "guess_steps",
        len(first),
        "guess_steps is the number of steps in an epoch, OFF",
        "a worker reads all images of the data set, 4 in a step",
        within=0,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_reading", "different images in a step", points=1) as student:
    first, second = images_per_step(24, 8, 2, "OFF")
    student.guess(
        "guess_different",
        len({*first[0], *second[0]}),
        "guess_different is the number of different images in a step, OFF",
        "which images does each of the two workers read in its first step?",
        within=0,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_reading", "unequal numbers of batches", points=1) as student:
    student.guess(
        "guess_together",
        steps_until_one_waits([1000, 437], 32),
        "guess_together is the number of steps that both make",
        "count the batches of each worker; the last one may be smaller",
        within=0,
    )

# %% [markdown]
# ## 2. The list of addresses (6 points)
# Write `tf_config(hosts, rank, job)`, which returns the text of `TF_CONFIG` for one worker:
#
# - `hosts` has the node of each rank, as in `["n2", "n2", "n10", "n10"]`: ranks 0 and 1 run on
#   n2. A node has at most 16 workers.
# - `job` is Slurm's job number, up to seven digits. Jobs of yours whose numbers differ by less
#   than 1,000 may run on the same nodes at the same time.
#
# All workers of a job must write the same list. No two workers may have the same address, also
# not in two such jobs; ports are numbers from 1024 to 65535. A worker whose port is taken ends
# with an error, or connects to the other job. Nobody reaches a worker whose rank has another
# node's address.


# %%
# answer: tf_config
import json


def tf_config(hosts, rank, job):
    """The text of TF_CONFIG for the worker with this rank."""
    ### BEGIN SOLUTION
    first_port = 10_000 + 16 * (job % 3_000)
    addresses = []
    for place, host in enumerate(hosts):
        port = first_port + hosts[:place].count(host)
        addresses.append(f"{host}:{port}")
    task = {"type": "worker", "index": rank}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})
    ### END SOLUTION


# %%
with exercise.check("tf_config", "index", points=1) as student:
    texts = [student.call("tf_config", ["n1", "n2"], rank, 4711) for rank in (0, 1)]
    found, why = addresses_and_ranks(texts)
    if student.expect(found is not None, "TensorFlow understands the text", why):
        ranks = [rank for _, rank in found]
        student.equal(ranks, [0, 1], "the index is the worker's rank, a number")

# %%
with exercise.check("tf_config", "order of the nodes", points=1) as student:
    texts = [student.call("tf_config", ["n2", "n10"], rank, 4711) for rank in (0, 1)]
    lists = [loads(text)["cluster"]["worker"] for text in texts]
    student.equal(lists[1], lists[0], "both workers have the same list")
    nodes = [address.partition(":")[0] for address in lists[0]]
    student.equal(nodes, ["n2", "n10"], "rank 0 has the address of its own node, n2")

# %%
with exercise.check("tf_config", "two workers on a node", points=1) as student:
    text = student.call("tf_config", ["n1", "n1", "n2", "n2"], 0, 4711)
    addresses = loads(text)["cluster"]["worker"]
    nodes = [address.partition(":")[0] for address in addresses]
    student.equal(nodes, ["n1", "n1", "n2", "n2"], "there is an address for each rank")
    student.expect(
        len(set(addresses)) == 4,
        "no two workers have the same address",
        f"the addresses are {', '.join(map(str, addresses))}",
    )

# %%
with exercise.check("tf_config", "two jobs on a node", points=1) as student:
    texts = [student.call("tf_config", ["n1", "n1"], 0, job) for job in (4711, 4712)]
    first, second = (loads(text)["cluster"]["worker"] for text in texts)
    student.expect(
        not set(first) & set(second),
        "two jobs have no address in common",
        f"job 4711 has {', '.join(map(str, first))}; job 4712, {', '.join(map(str, second))}",
    )

# %%
with exercise.check("tf_config", "other nodes and jobs", points=2, hidden=True) as student:
    nodes = [student.random.randint(2, 9), student.random.randint(10, 19), 1]
    hosts = [f"gpu{node}" for node in nodes for _ in range(student.random.randint(3, 16))]
    job = student.random.randint(1_000_000, 9_999_000)
    texts = [student.call("tf_config", hosts, rank, job) for rank in range(len(hosts))]
    found, why = addresses_and_ranks(texts)
    if student.expect(found is not None, "TensorFlow understands all texts", why):
        lists = [addresses for addresses, _ in found]
        student.equal(lists, lists[:1] * len(hosts), "all workers have the same list")
        named = [address.partition(":")[0] for address in lists[0]]
        student.equal(named, hosts, "each rank has the address of its own node")
        ranks = [rank for _, rank in found]
        student.equal(ranks, list(range(len(hosts))), "the index is the worker's rank")
        others = []
        for distance in (1, 100, 500, 999):
            text = student.call("tf_config", hosts, 0, job + distance)
            others += loads(text)["cluster"]["worker"]
        student.expect(
            not set(lists[0]) & set(others), "no other job has one of the addresses"
        )
        ports = [int(address.partition(":")[2]) for address in lists[0] + others]
        student.expect(
            min(ports) >= 1024 and max(ports) <= 65535, "all ports are from 1024 to 65535"
        )

# %% [markdown]
# ## 3. A sharded read (6 points)
# Write `read(order, batch, workers, worker)`: what one worker reads in an epoch. `order` lists
# all images, shuffled in the same way on all workers; `batch` is the size of the global batch,
# a multiple of `workers`. Return a list with an item for each step: the list of
# `(image, weight)` pairs that this worker reads, always `batch // workers` pairs.
#
# A step's images, on all workers together, are the next `batch` images of the order. The last
# global batch can be smaller: then it is padded with any images, of weight 0. Each other image
# of a batch has the weight 1 / (images in this batch). So the workers learn what one device
# learns. If the numbers of steps differ, and each worker feeds its own tensors to
# `strategy.run`, one worker waits for the other.


# %%
# answer: read
def read(order, batch, workers, worker):
    """The (image, weight) pairs of each step of this worker."""
    ### BEGIN SOLUTION
    size = batch // workers
    steps = []
    for start in range(0, len(order), batch):
        images = order[start : start + batch]
        pairs = [(image, 1 / len(images)) for image in images]
        pairs += [(order[0], 0.0)] * (batch - len(images))
        steps.append(pairs[size * worker : size * (worker + 1)])
    return steps
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
# setup


def expect_shards(student, order, batch, workers):
    """Verdicts on what all workers read."""
    plans = [student.call("read", order, batch, workers, worker) for worker in range(workers)]
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    if not student.equal(
        [len(plan) for plan in plans],
        [len(batches)] * workers,
        "all workers make as many steps as one device",
    ):
        return
    size = batch // workers
    sizes = sorted({len(step) for plan in plans for step in plan})
    student.expect(
        sizes == [size],
        "a worker reads batch // workers pairs in each step",
        f"expected {size}, but there are steps with {' and '.join(map(str, sizes))}",
    )
    steps = [[*chain(*parts)] for parts in zip(*plans, strict=True)]
    counted = [sorted(image for image, weight in step if weight) for step in steps]
    if not student.equal(
        counted,
        [sorted(images) for images in batches],
        "the images of a step are those of the global batch, each once",
    ):
        return
    student.close_to(
        [[weight for _, weight in step if weight] for step in steps],
        [[1 / len(images)] * len(images) for images in batches],
        "an image's weight is 1 / (images in this batch)",
    )


# %%
with exercise.check("read", "even batches", points=2) as student:
    expect_shards(student, [5, 2, 7, 0, 3, 6, 1, 4], batch=4, workers=2)

# %%
with exercise.check("read", "a smaller last batch", points=2) as student:
    expect_shards(student, [5, 2, 9, 7, 0, 3, 6, 8, 1, 4], batch=4, workers=2)

# %%
with exercise.check("read", "other numbers", points=2, hidden=True) as student:
    workers = student.random.randint(3, 5)
    batch = workers * student.random.randint(2, 4)
    images = batch * student.random.randint(2, 5) + 1
    order = student.random.sample(range(images), images)
    expect_shards(student, order, batch, workers)

# %% [markdown]
# ## 4. It worked until the files changed: find the bug (5 points)
# Here each worker reads its own files, without a distributed data set, and somebody wrote the
# loop. The model is one weight w; the loss of a number is (w − number)². `batches` are this
# worker's batches, tensors of numbers. Each worker is a process.

# %%
# given
import torch
import torch.distributed as dist


def broken_train(w, batches, rate):
    """Train on this worker's batches. Returns the weight after each step."""
    weights = []
    for numbers in batches:
        gradient = (2 * (w - numbers)).sum()
        total = torch.stack([gradient, torch.tensor(float(len(numbers)))])
        dist.all_reduce(total)
        w = w - rate * total[0] / total[1]
        weights.append(w)
    return weights


# %% [markdown]
# **What people see.** As long as all workers have the same number of batches, all is right.
# Then someone adds a file on one node. Near its end the first epoch stops, without a message,
# as long as the other worker's process lives. The checks end it, and say who waits for whom.
#
# Write `train`, which makes as many steps as the worker with the most batches. The gradient of
# a step is the mean over the numbers of all workers that still have a batch. No number may be
# left out, and none may count twice. All workers have the same weight after each step. A
# worker can have no batch at all. Send sums, not the numbers. To try the broken loop, let your
# function return `broken_train(w, batches, rate)` first, and run the checks.


# %%
# answer: train
def train(w, batches, rate):
    """Train on all workers' batches. Returns the weight after each step.

    w is a tensor of shape (); batches, a list of tensors; rate, the learning rate.
    """
    ### BEGIN SOLUTION
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    weights = []
    for step in range(int(steps)):
        numbers = batches[step] if step < len(batches) else torch.zeros(0)
        gradient = (2 * (w - numbers)).sum()
        total = torch.stack([gradient, torch.tensor(float(len(numbers)))])
        dist.all_reduce(total)
        w = w - rate * total[0] / total[1]
        weights.append(w)
    return weights
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
# setup


def train_alone(w, batches_of_workers, rate):
    """The weight after each step, if one device has the numbers of all workers."""
    weights = []
    for step in range(max(map(len, batches_of_workers))):
        numbers = torch.cat([each[step] for each in batches_of_workers if step < len(each)])
        w = w - rate * (2 * (w - numbers)).mean()
        weights.append(w)
    return weights


# %%
with exercise.check("train", "equal numbers of batches, or none", points=1) as student:
    batches = [
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])],
        [torch.tensor([6.0]), torch.tensor([8.0, 9.0, 1.0])],
    ]
    w = torch.tensor(0.0)
    run = student.ranks("train", [[w, each, 0.1] for each in batches])
    expected = train_alone(w, batches, 0.1)
    student.close_to(run.values, [expected] * 2, "both workers have one device's weights")
    run = student.ranks("train", [[w, batches[0], 0.1], [w, [], 0.1]])
    expected = train_alone(w, [batches[0], []], 0.1)
    student.close_to(run.values, [expected] * 2, "also if one worker has no batch")

# %%
with exercise.check("train", "one batch more", points=2) as student:
    batches = [list(torch.arange(30.0).split(10)), list(torch.arange(40.0, 60.0).split(10))]
    w = torch.tensor(0.0)
    run = student.ranks("train", [[w, each, 0.1] for each in batches])
    expected = train_alone(w, batches, 0.1)
    student.equal([len(each) for each in run.values], [3, 3], "both workers make three steps")
    student.close_to(run.values, [expected] * 2, "both workers have one device's weights")
    numbers = [sum(t.numel() for call in calls for t in call.tensors) for calls in run.calls]
    student.expect(
        max(numbers) <= 12,
        "the workers send sums, not their numbers",
        f"in three steps with 10 numbers each they send {numbers} numbers",
    )

# %%
with exercise.check("train", "other workers", points=2, hidden=True) as student:
    counts = [0, 1, student.random.randint(2, 3), 5]
    student.random.shuffle(counts)
    batches = [
        [
            torch.randn(student.random.randint(1, 5), generator=student.generator)
            for _ in range(count)
        ]
        for count in counts
    ]
    w = torch.randn((), generator=student.generator)
    run = student.ranks("train", [[w, each, 0.2] for each in batches])
    expected = train_alone(w, batches, 0.2)
    student.close_to(
        run.values, [expected] * 4, "all workers have one device's weights", 1e-4, 1e-5
    )

# %%
exercise.summary()
