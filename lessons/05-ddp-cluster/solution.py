# %% [markdown]
# # Exercises: DDP on a cluster
# 60 minutes, 20 points. Do lesson 05's notebook first. Run the first code cell before all
# others: its text is folded, and the checks need it. Then run the cells from top to bottom,
# and write your answers in place of `# YOUR CODE HERE`.
#
# - The checks under a question call your functions and print a verdict for each statement.
#   When your notebook is graded, hidden checks also try other values.
# - The checks start a new process for each rank. It runs only the cells that begin with
#   `# given` or `# answer`. So write all that an answer needs, imports too, into its cell.
# - The checks are the network between the ranks, and record each collective. One that would
#   hang on a cluster ends with a sentence.
#
# The questions do not depend on each other. Question 3 is the longest: plan 30 minutes. If you
# have less time, do the others first.

# %% jupyter={"source_hidden": true}
# setup
from itertools import chain, pairwise, zip_longest

from multigpu.exercise import Exercise

exercise = Exercise("05-ddp-cluster")


def random_weights(sizes, generator):
    """The weights of a Net with these numbers of features."""
    return [
        (torch.randn(out, into, generator=generator), torch.randn(out, generator=generator))
        for into, out in pairwise(sizes)
    ]


def random_batches(counts, sizes, generator):
    """A rank's micro-batches of `counts` rows: (rows, targets)."""
    return [
        (
            torch.randn(rows, sizes[0], generator=generator),
            torch.randn(rows, sizes[-1], generator=generator),
        )
        for rows in counts
    ]


def own_gradients(weights, rank, batches, images, factors, unused=0):
    """The part of a rank's rows in the gradient, weight by weight, as the gates scale it."""
    model = Net(weights, unused)
    for rows, targets in batches:
        (row_losses(model, rows, targets).sum() / images).backward()
    gradients = []
    scale = 1.0
    for number in range(len(weights), 0, -1):
        scale *= factors.get(f"rank {rank}, layer {number}", 1.0)
        for weight in reversed(list(model.layers[number - 1].parameters())):
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad * scale
            gradients.insert(0, gradient)
    return gradients


def gradients_of_all(weights, batches, factors, unused=()):
    """The gradient of the mean loss over the rows of all ranks, weight by weight."""
    images = sum(len(rows) for of_rank in batches for rows, _ in of_rank)
    of_ranks = [
        own_gradients(weights, rank, of_rank, images, factors, dict(unused).get(rank, 0))
        for rank, of_rank in enumerate(batches)
    ]
    return [sum(parts) for parts in zip(*of_ranks, strict=True)]


def numbers(rows):
    """A list of numbers, also for a tensor and for a list of tensors."""
    return torch.as_tensor(rows).tolist()


def log(events):
    """A rank's events from the beginning of its backward on, as text."""
    lines = []
    for kind, what in events:
        if kind == "gate":
            lines.append("backward: " + what.partition(", ")[2])
        elif lines:
            lines.append(f"{kind}: {what} bytes")
    return lines


def log_difference(got, expected):
    """The first line in which a log differs from the expected one; "" if none does."""
    for number, (line, wanted) in enumerate(zip_longest(got, expected), 1):
        if line != wanted:
            is_line = "no line" if line is None else repr(line)
            should_be = "no line" if wanted is None else repr(wanted)
            return f"line {number} of the log: expected {should_be}, got {is_line}"
    return ""


# %%
# given
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from multigpu.exercise import gate

# As on a cluster, no two processes draw the same random numbers, unless they set a seed.
torch.seed()
random.seed()

# %% [markdown]
# ## 1. Predict: the accuracy of a padded evaluation (2 points)
# Four ranks share 10 test images by `DistributedSampler(test, shuffle=False)`. Each rank
# counts its images and its hits, and an all-reduce adds them up. The model is wrong on image 0
# and right on the other nine, so one GPU reports 90%. Which accuracy do the four ranks report,
# in percent?

# %%
# answer: guess_accuracy
guess_accuracy = None  # in percent; within 0.5 is right
### BEGIN SOLUTION
guess_accuracy = 83.3  # images 0 and 1 are repeated: 10 hits of 12
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_accuracy", "10 images on 4 ranks", points=2) as student:
    hits = [
        image != 0
        for rank in range(4)
        for image in DistributedSampler(range(10), 4, rank, shuffle=False)
    ]
    student.guess(
        "guess_accuracy",
        100 * sum(hits) / len(hits),
        "this is the accuracy that the ranks report",
        "the experiment gives another one: which images does each of the four samplers give?",
        within=0.5,
        unit="percent",
    )

# %% [markdown]
# ## 2. Write: the shard of a rank (4 points)
# Write `shard(n, ranks, rank, epoch)`, which does the work of `DistributedSampler` and
# `set_epoch`. It returns a list: the numbers of the rows, out of 0 to n − 1, that this rank
# reads in this epoch, in this order.
#
# - All rows are read in each epoch.
# - All ranks read equally many rows, because all must make the same number of steps. Some rows
#   are repeated for that, as few as possible. There may be fewer rows than ranks.
# - The rows are shuffled. In another epoch a rank reads another set of rows: the same rows in
#   another order are not enough.
# - The ranks are separate processes and send nothing: each computes its own shard.
#
# For example, `shard(50, 4, rank, 0)` has 13 rows on each rank, 52 in all: 2 are repeated.
# `shard(1, 4, rank, 0)` is `[0]` on each rank: row 0 is read four times. If `shard` is wrong,
# there is no error: the model learns from fewer images, or sees each image several times in an
# epoch, and its accuracy is lower than it could be.


# %%
# answer: shard
def shard(n: int, ranks: int, rank: int, epoch: int) -> list[int]:
    """The rows that this rank reads in this epoch."""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(n, generator=generator).tolist()
    per_rank = -(-n // ranks)
    return [order[place % n] for place in range(rank, per_rank * ranks, ranks)]
    ### END SOLUTION


# %%
with exercise.check("shard", "50 rows on 4 ranks", points=1) as student:
    run = student.ranks("shard", [[50, 4, rank, 0] for rank in range(4)])
    shards = [numbers(rows) for rows in run.values]
    student.equal([len(rows) for rows in shards], [13] * 4, "each rank reads 13 rows")
    missing = 50 - len({*chain(*shards)} & {*range(50)})
    student.expect(
        {*chain(*shards)} == {*range(50)},
        "together they read all rows",
        f"{missing} rows are missing: do all ranks shuffle in the same order?"
        if missing
        else "there are numbers that are not from 0 to 49",
    )

# %%
with exercise.check("shard", "another epoch", points=1) as student:
    epochs = [numbers(student.call("shard", 100, 4, 1, epoch)) for epoch in range(3)]
    student.expect(
        all(rows != sorted(rows) for rows in epochs),
        "the rows are shuffled",
        "they come in rising order",
    )
    student.expect(
        len({frozenset(rows) for rows in epochs}) == 3,
        "in another epoch the rank reads another set of rows",
        "the rank reads the same set of rows in two epochs, as without set_epoch",
    )

# %%
with exercise.check("shard", "other numbers of rows", points=2, hidden=True) as student:
    ranks = student.random.randint(5, 7)
    cases = {
        "fewer rows than ranks": student.random.randint(1, 2),
        "equal shards": 3 * ranks,
        "another number of rows": student.random.randint(20, 40),
    }
    for case, n in cases.items():
        epoch = student.random.randint(1, 1000)
        calls = [[n, ranks, rank, epoch] for rank in range(ranks)]
        shards = [numbers(rows) for rows in student.ranks("shard", calls).values]
        size = -(-n // ranks)
        student.expect(
            [len(rows) for rows in shards] == [size] * ranks,
            f"{case}: all ranks read equally many rows, and no more than needed",
            f"{n} rows on {ranks} ranks gave shards of {[len(rows) for rows in shards]}",
        )
        student.expect(
            {*chain(*shards)} == {*range(n)},
            f"{case}: together they read all rows",
            f"{n} rows on {ranks} ranks: do all ranks shuffle in the same order?",
        )

# %% [markdown]
# ## 3. Write: MyDDP (8 points)
# Write DDP yourself, without torch's `DistributedDataParallel`. `train_step` in the next cell
# shows how it is used: it makes `MyDDP(model, bucket_bytes)`, then calls
# `ddp.backward(losses, images, is_last)` once for each micro-batch.
#
# - `MyDDP(model, bucket_bytes)` broadcasts rank 0's weights. Its buckets are those of
#   `fill_buckets(model, bucket_bytes)` in the next cell: lists of parameters, in the order of
#   backward, from the last parameter to the first. Parameters go into a bucket until it has
#   `bucket_bytes` bytes or more. The next parameter begins a new bucket. The last bucket may
#   have fewer bytes.
# - `backward(losses, images, is_last)` runs backward for a micro-batch: `losses` has one loss
#   for each of its rows, and `images` is the number of rows in all micro-batches of all ranks.
#   After the last one, each weight's `.grad` is the gradient of the mean loss over all these
#   rows, on all ranks. Ranks may have different numbers of rows and of micro-batches.
# - In the backward of the last micro-batch, a bucket's all-reduce begins as soon as its
#   gradients are complete. Backward goes on: a hook does not wait. There is one all-reduce for
#   each bucket, and no other.
# - All ranks send bucket 0 first, then bucket 1, and so on. If a rank does not use a layer in
#   this step, the rank's gradient of it counts as 0. The rank sends the bucket of that layer,
#   and all buckets with a higher number, after backward.
#
# Useful: `weight.register_post_accumulate_grad_hook(function)` calls `function(weight)` when
# `.grad` is complete. `work = dist.all_reduce(tensor, async_op=True)` begins an all-reduce.
# `work.wait()` waits for its end.
#
# A model has four layers: 6 → 8 → 8 → 8 → 3 features, 4 bytes a number. With `bucket_bytes`
# 256 it has three buckets, and a step has this log, on each rank. For example, layer 4 has
# 4 · (3 · 8 + 3) = 108 bytes, fewer than 256, so layer 3 with its 288 bytes goes into the same
# bucket.
#
#     backward: layer 4
#     backward: layer 3
#     all_reduce: 396 bytes          (layers 4 and 3)
#     backward: layer 2
#     all_reduce: 288 bytes          (layer 2)
#     backward: layer 1
#     all_reduce: 224 bytes          (layer 1)
#
# Mistakes here have three symptoms: the ranks' weights slowly differ; the weights are right,
# but a step takes as long as without overlap; the run hangs in its first step.


# %%
# given
class Net(nn.Module):
    """Linear layers with tanh between them. `gate` shows the checks where backward is."""

    def __init__(self, weights, unused=0):
        """Set the layers' weights: a list of (weight, bias). `unused` is a layer's number."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*weight.shape[::-1]) for weight, _ in weights)
        for layer, (weight, bias) in zip(self.layers, weights, strict=True):
            layer.weight.data = weight.clone()
            layer.bias.data = bias.clone()
        self.unused = unused

    def forward(self, rows):
        rank = dist.get_rank() if dist.is_initialized() else 0
        for number, layer in enumerate(self.layers, 1):
            if number != self.unused:
                rows = gate(layer(rows.tanh()), f"rank {rank}, layer {number}")
        return rows


def fill_buckets(model, bucket_bytes):
    """The buckets: lists of parameters, from the model's last parameter to its first."""
    buckets = [[]]
    for weight in reversed(list(model.parameters())):
        if sum(other.nbytes for other in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(weight)
    return buckets


def row_losses(model, rows, targets):
    """The loss of each row."""
    return (model(rows) - targets).square().mean(1)


def train_step(weights, micro_batches, images, bucket_bytes, late=0.0, unused=0):
    """A step of one rank. Returns the weights that it starts with, and the gradients.

    micro_batches   a list of (rows, targets)
    images          the number of rows of all ranks
    late            seconds that this rank is slower than others
    unused          the number of a layer that this rank does not use
    """
    model = Net(weights, unused)
    ddp = MyDDP(model, bucket_bytes)
    start = [weight.detach().clone() for weight in model.parameters()]
    time.sleep(late)
    for number, (rows, targets) in enumerate(micro_batches, 1):
        losses = row_losses(model, rows, targets)
        ddp.backward(losses, images, is_last=number == len(micro_batches))
    return start, [weight.grad for weight in model.parameters()]


# %%
# answer: my_ddp
class MyDDP:
    """Averages a model's gradients over the ranks while backward runs."""

    def __init__(self, model: nn.Module, bucket_bytes: int):
        ### BEGIN SOLUTION
        self.buckets = fill_buckets(model, bucket_bytes)
        self.is_last = False
        for weight in model.parameters():
            dist.broadcast(weight.data, src=0)
            weight.register_post_accumulate_grad_hook(self.on_gradient)
        ### END SOLUTION

    def backward(self, losses: torch.Tensor, images: int, is_last: bool) -> None:
        """Run backward; after the last micro-batch, all ranks have the whole gradient."""
        ### BEGIN SOLUTION
        self.is_last = is_last
        self.ready = set()
        self.sent = []
        (losses.sum() * dist.get_world_size() / images).backward()
        if is_last:
            while len(self.sent) < len(self.buckets):
                self.send()  # those with a weight that this rank did not use
            for bucket, flat, work in self.sent:
                work.wait()
                flat /= dist.get_world_size()
                parts = flat.split([weight.numel() for weight in bucket])
                for weight, part in zip(bucket, parts, strict=True):
                    weight.grad = part.view_as(weight)

    def on_gradient(self, weight: nn.Parameter) -> None:
        """Send the next buckets, if they are complete."""
        if self.is_last:
            self.ready.add(weight)
            while len(self.sent) < len(self.buckets) and self.ready.issuperset(
                self.buckets[len(self.sent)]
            ):
                self.send()

    def send(self) -> None:
        """Begin the all-reduce of the next bucket."""
        bucket = self.buckets[len(self.sent)]
        gradients = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad
            for weight in bucket
        ]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        ### END SOLUTION


# %%
with exercise.check("my_ddp", "two ranks", points=1) as student:
    sizes = [3, 4, 2]
    weights, others = [random_weights(sizes, student.generator) for _ in range(2)]
    batches = [random_batches([4], sizes, student.generator) for _ in range(2)]
    arguments = [[weights, batches[0], 8, 50, 0.0], [others, batches[1], 8, 50, 0.1]]
    run = student.ranks("train_step", arguments)
    first = [tensor for layer in weights for tensor in layer]
    student.close_to(
        [start for start, _ in run.values], [first] * 2, "all have rank 0's weights"
    )
    expected = gradients_of_all(weights, batches, run.factors)
    student.close_to(run.values[0][1], expected, "on rank 0, the gradient is that of all rows")
    student.close_to(run.values[1][1], expected, "on rank 1, the gradient is that of all rows")

# %%
with exercise.check("my_ddp", "5 and 2 rows", points=1) as student:
    sizes = [3, 4, 2]
    weights = random_weights(sizes, student.generator)
    batches = [random_batches([rows], sizes, student.generator) for rows in (5, 2)]
    arguments = [[weights, own, 7, 50, 0.1 * rank] for rank, own in enumerate(batches)]
    run = student.ranks("train_step", arguments)
    expected = gradients_of_all(weights, batches, run.factors)
    student.close_to(
        [gradients for _, gradients in run.values],
        [expected] * 2,
        "the gradient is that of the mean over all 7 rows",
    )

# %%
with exercise.check("my_ddp", "the log of a step", points=2) as student:
    sizes = [6, 8, 8, 8, 3]
    weights = random_weights(sizes, student.generator)
    batches = [random_batches([4], sizes, student.generator) for _ in range(2)]
    run = student.ranks("train_step", [[weights, own, 8, 256] for own in batches])
    expected = [
        "backward: layer 4",
        "backward: layer 3",
        "all_reduce: 396 bytes",
        "backward: layer 2",
        "all_reduce: 288 bytes",
        "backward: layer 1",
        "all_reduce: 224 bytes",
    ]
    as_expected = True
    for rank in range(2):
        difference = log_difference(log(run.events[rank]), expected)
        statement = f"rank {rank}'s log is as in the text"
        as_expected = student.expect(not difference, statement, difference) and as_expected
    if as_expected:
        calls = [call for call in run.calls[0] if call.kind == "all_reduce"]
        gradients = own_gradients(weights, 0, batches[0], 8, run.factors)
        buckets = gradients[4:], gradients[2:4], gradients[:2]
        norm = torch.nn.utils.get_total_norm
        sent = torch.stack([norm(call.tensors) for call in calls]).double()
        norms = torch.stack([norm(bucket) for bucket in buckets]).double()
        student.expect(
            torch.allclose(sent / sent[0], norms / norms[0], rtol=1e-4),
            "each all-reduce sends the gradients of its bucket",
            "it sends other numbers: when is its tensor filled, and from which gradients?",
        )

# %%
with exercise.check("my_ddp", "three micro-batches", points=1) as student:
    sizes = [3, 4, 2]
    weights = random_weights(sizes, student.generator)
    batches = [random_batches([2, 2, 2], sizes, student.generator) for _ in range(2)]
    arguments = [[weights, own, 12, 50, 0.1 * rank] for rank, own in enumerate(batches)]
    run = student.ranks("train_step", arguments)
    expected = gradients_of_all(weights, batches, run.factors)
    student.close_to(
        [gradients for _, gradients in run.values],
        [expected] * 2,
        "the gradient is that of all micro-batches of all ranks",
    )
    counts = [sum(call.kind == "all_reduce" for call in calls) for calls in run.calls]
    student.expect(
        counts == [2, 2],
        "there is one all-reduce a bucket, not one a micro-batch",
        f"two buckets and three micro-batches: the ranks called {counts} all-reduces",
    )

# %%
with exercise.check("my_ddp", "a slow rank", points=1) as student:
    sizes = [6, 8, 8, 8, 3]
    weights = random_weights(sizes, student.generator)
    batches = [random_batches([4], sizes, student.generator) for _ in range(2)]
    for late in (0.2, 2.0):  # on a machine that is busy, 0.2 s can be too short
        arguments = [[weights, batches[0], 8, 256], [weights, batches[1], 8, 256, late]]
        run = student.ranks("train_step", arguments)
        gates = list(run.factors)
        fast = [f"rank 0, layer {number}" for number in (4, 3, 2, 1)]
        if gates[:4] == fast:
            break
    student.expect(
        gates[:4] == fast,
        "rank 0's backward ends while rank 1 is still in its forward",
        "it stops at an all-reduce until rank 1 also calls it: a hook must only begin it",
    )
    lines = [line.partition(":")[0] for line in log(run.events[0])]
    student.expect(
        "all_reduce" in lines[: lines.count("backward")],
        "rank 0 begins an all-reduce before its backward ends",
        "all of its all-reduces begin after backward: nothing overlaps",
    )

# %%
with exercise.check("my_ddp", "a layer that rank 0 does not use", points=1) as student:
    sizes = [6, 8, 8, 8, 3]
    weights = random_weights(sizes, student.generator)
    batches = [random_batches([4], sizes, student.generator) for _ in range(2)]
    arguments = [[weights, batches[0], 8, 256, 0.0, 3], [weights, batches[1], 8, 256, 0.1]]
    run = student.ranks("train_step", arguments)
    expected = gradients_of_all(weights, batches, run.factors, {0: 3})
    student.close_to(
        [gradients for _, gradients in run.values],
        [expected] * 2,
        "without it, rank 0's gradient of layer 3 counts as 0",
    )

# %%
with exercise.check(
    "my_ddp", "three ranks, other layers and buckets", points=1, hidden=True
) as student:
    width = student.random.randint(5, 9)
    sizes = [student.random.randint(2, 6), width, width, width, width, 4]
    weights = random_weights(sizes, student.generator)
    counts = [[student.random.randint(1, 4) for _ in range(n)] for n in (1, 3, 2)]
    batches = [random_batches(rows, sizes, student.generator) for rows in counts]
    images = sum(map(sum, counts))
    full = 4 * width * width  # a bucket is full with the weight of a layer in the middle
    arguments = [[weights, own, images, full, 0.1 * rank] for rank, own in enumerate(batches)]
    run = student.ranks("train_step", arguments)
    expected = gradients_of_all(weights, batches, run.factors)
    student.close_to(
        [gradients for _, gradients in run.values],
        [expected] * 3,
        "the gradient is that of all rows",
        rtol=1e-4,
        atol=1e-5,
    )
    lines = []
    size = 0
    for number in range(5, 0, -1):
        lines.append(f"backward: layer {number}")
        for tensor in reversed(weights[number - 1]):
            size += tensor.nbytes
            if size >= full:
                lines.append(f"all_reduce: {size} bytes")
                size = 0
    if size:
        lines.append(f"all_reduce: {size} bytes")
    differences = []
    for rank, events in enumerate(run.events):
        got = log(events)
        starts = [place for place, line in enumerate(got) if line == lines[0]]
        if difference := log_difference(got[starts[-1] if starts else 0 :], lines):
            differences.append(f"rank {rank}, last micro-batch, {difference}")
    student.expect(
        not differences,
        "each bucket's all-reduce begins when it is complete",
        "".join(differences[:1]),
    )

# %% [markdown]
# ## 4. Find the bugs: the end of an epoch (6 points)
# A program calls `finish_epoch(ddp, losses, rows, labels)` on every rank when an epoch has
# ended:
#
# - `losses` has the loss of each image that this rank has trained on. `rows` and `labels` are
#   the whole test set, on every rank.
# - On every rank it returns `{"loss": …, "accuracy": …}`: the mean loss of the images of all
#   ranks, and the accuracy on the test set, of which each rank computes its part. On rank 0
#   there is also `"weights"`, a state dict for a model without DDP.
# - The evaluation does not change the model. Afterwards the model is in training mode, because
#   the next epoch begins.
#
# The next cell has the program with its bugs. On two ranks it hangs when the first epoch ends.
# When that is mended, there are further symptoms: each rank logs another loss; the accuracy is
# not that of one GPU; loading the weights raises `Unexpected key(s) in state_dict:
# "module.0.weight"`; each evaluation changes BatchNorm's running means, and what is predicted
# for an image depends on the other images.
#
# Write `finish_epoch` without these bugs. The ranks may have different numbers of test images.
# If there are fewer test images than ranks, some ranks have none. A rank may also have no
# loss.


# %%
# given
def broken_finish_epoch(ddp, losses, rows, labels):
    report = {"loss": losses.mean().item()}
    sampler = DistributedSampler(rows, shuffle=False)
    images = torch.tensor(list(sampler))
    counts = torch.tensor([0, len(images)])
    with torch.no_grad():
        for batch in images.split(2):
            counts[0] += (ddp(rows[batch]).argmax(1) == labels[batch]).sum()
    if dist.get_rank() == 0:
        dist.all_reduce(counts)
        report["weights"] = ddp.state_dict()
    report["accuracy"] = (counts[0] / counts[1]).item()
    return report


def new_model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def end_of_epoch(weights, losses, rows, labels):
    """What the program does on one rank, after its training. Adds whether it can go on."""
    model = new_model()
    model.load_state_dict(weights)
    report = finish_epoch(DDP(model), losses, rows, labels)
    report["training mode"] = all(module.training for module in model.modules())
    if "weights" in report:
        report["weights"] = dict(report["weights"])
    return report


# %%
# answer: finish_epoch
def finish_epoch(
    ddp: DDP, losses: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor
) -> dict:
    """The report of an epoch: the mean loss and the accuracy, and rank 0's weights."""
    ### BEGIN SOLUTION
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = ddp.module  # DDP's forward sends buffers: a rank without images would not
    model.eval()
    images = torch.arange(len(rows))[rank::ranks]
    hits = 0
    with torch.no_grad():
        for batch in images.split(2):
            hits += (model(rows[batch]).argmax(1) == labels[batch]).sum().item()
    model.train()
    sums = torch.tensor([losses.sum().item(), len(losses), hits, len(images)]).double()
    dist.all_reduce(sums)
    loss, trained, hits, tested = sums.tolist()
    report = {"loss": loss / trained, "accuracy": hits / tested}
    if rank == 0:
        report["weights"] = model.state_dict()
    return report
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
# setup
def test_set(count, generator):
    """Weights, `count` rows, and labels; the model is wrong on row 0 only."""
    model = new_model()
    weights = {}
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value = torch.rand(value.shape, generator=generator) + 0.1
            value = value if name.startswith("1.") else value - 0.6
        weights[name] = value
    model.load_state_dict(weights)
    rows = torch.randn(count, 4, generator=generator)
    with torch.no_grad():
        labels = model.eval()(rows).argmax(1)
    labels[0] = (labels[0] + 1) % 3
    return weights, rows, labels


def rows_for_two(count, generator):
    """Weights, the rows of two ranks, and labels, which rank 1's rows are never taken for.

    So the number of hits says how many of the rows rank 0 has computed.
    """
    weights, rows, _ = test_set(1000, generator)
    model = new_model()
    model.load_state_dict(weights)
    with torch.no_grad():
        classes = model.eval()(rows).argmax(1)
    others = [rows[classes != label][0] for label in classes[:count]]
    return weights, [rows[:count], torch.stack(others)], classes[:count]


# %%
with exercise.check("finish_epoch", "the loss", points=1) as student:
    test = test_set(4, student.generator)
    losses = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]
    weights, rows, labels = test
    run = student.ranks("end_of_epoch", [[weights, each, rows, labels] for each in losses])
    reported = [report["loss"] for report in run.values]
    student.close_to(reported, [4.0, 4.0], "both ranks report the mean loss of all images")

# %%
with exercise.check("finish_epoch", "the accuracy", points=1) as student:
    weights, rows, labels = test_set(7, student.generator)
    losses = torch.ones(3)
    run = student.ranks("end_of_epoch", [[weights, losses, rows, labels]] * 3)
    reported = [report["accuracy"] for report in run.values]
    student.close_to(reported, [6 / 7] * 3, "three ranks report 6 hits of 7 test images")
    weights, of_ranks, labels = rows_for_two(7, student.generator)
    arguments = [[weights, losses, rows, labels] for rows in of_ranks]
    run = student.ranks("end_of_epoch", arguments)
    first, second = (report["accuracy"] for report in run.values)
    student.expect(
        first == second and any(abs(first - hits / 7) < 1e-6 for hits in range(1, 7)),
        "each rank computes its part of the test images",
        "a rank computes all of them, or none",
    )

# %%
with exercise.check("finish_epoch", "fewer test images than ranks", points=1) as student:
    weights, rows, labels = test_set(2, student.generator)
    run = student.ranks("end_of_epoch", [[weights, torch.ones(3), rows, labels]] * 3)
    reported = [report["accuracy"] for report in run.values]
    student.close_to(reported, [1 / 2] * 3, "three ranks report 1 hit of 2 test images")

# %%
with exercise.check("finish_epoch", "the names of the weights", points=1) as student:
    weights, rows, labels = test_set(4, student.generator)
    run = student.ranks("end_of_epoch", [[weights, torch.ones(3), rows, labels]] * 2)
    names = list(run.values[0]["weights"])
    student.equal(
        sorted(names), sorted(weights), "a model without DDP can load rank 0's weights"
    )
    loaded = run.values[0]["weights"].values()
    student.expect(any(value.any() for value in loaded), "they are not all 0")

# %%
with exercise.check("finish_epoch", "the model stays as it was", points=1) as student:
    weights, rows, labels = test_set(8, student.generator)
    run = student.ranks("end_of_epoch", [[weights, torch.ones(3), rows, labels]] * 2)
    loaded = run.values[0]["weights"]
    loaded = {name.removeprefix("module."): value for name, value in loaded.items()}
    student.close_to(
        loaded, weights, "the evaluation changes neither weights nor running means"
    )
    student.expect(
        all(report["training mode"] for report in run.values),
        "afterwards the model is in training mode",
        "a layer is still in evaluation mode: who calls train() after the evaluation?",
    )

# %%
with exercise.check("finish_epoch", "other numbers", points=1, hidden=True) as student:
    ranks = student.random.randint(4, 5)
    weights, rows, labels = test_set(3, student.generator)
    counts = [*(student.random.randint(1, 5) for _ in range(ranks - 1)), 0]
    losses = [torch.rand(count, generator=student.generator) for count in counts]
    run = student.ranks("end_of_epoch", [[weights, own, rows, labels] for own in losses])
    student.close_to(
        [report["loss"] for report in run.values],
        [torch.cat(losses).mean().item()] * ranks,
        "all ranks report the mean loss of all images",
    )
    student.close_to(
        [report["accuracy"] for report in run.values],
        [1 - 1 / len(rows)] * ranks,
        "all ranks report the accuracy, also if some have no test image",
    )

# %% [markdown]
# ## Your points

# %%
exercise.summary()
