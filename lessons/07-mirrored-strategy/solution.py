# %% [markdown]
# # Exercises: MirroredStrategy
# 50 minutes, 20 points. Run the next cell first: it imports TensorFlow, which takes ten
# seconds.
#
# Write each answer in its cell, which begins with `# answer:`, and run it. Then run the checks
# below it. A check calls your functions in a process of their own, which gets the cells that
# begin with `# given` and your answer, and nothing else: imports and helpers of an answer
# stand in its own cell. When you hand in the notebook, hidden checks try other values. The
# last cell adds up your points.

# %% jupyter={"source_hidden": true}
# setup
import functools
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all runs on the CPU

import torch

from multigpu import tf_common
from multigpu.exercise import Exercise
from multigpu.tf_common import tf

strategy = tf.distribute.MirroredStrategy(tf_common.devices(2))
exercise = Exercise("07-mirrored-strategy")


@functools.cache
def moving_statistics(synchronized):
    """Train BatchNorm for 20 steps on two replicas. Returns replica 0's mean and variance."""
    with strategy.scope():
        norm = tf.keras.layers.BatchNormalization(momentum=0.5, synchronized=synchronized)
        norm.build((None, 1))
    numbers = tf.constant([[1.0], [2.0], [3.0], [6.0]])

    def of_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        norm(numbers[2 * replica : 2 * replica + 2], training=True)

    # A concrete function, because TensorFlow warns if one tf.function is made five times.
    step = tf.function(lambda: strategy.run(of_replica)).get_concrete_function()
    for _ in range(20):
        step()
    variables = (norm.moving_mean, norm.moving_variance)
    copies = [strategy.experimental_local_results(each.value)[0] for each in variables]
    return [copy.numpy().item() for copy in copies]


@functools.cache
def gradient_step():
    """A function of numbers, weights, and the bounds of the shards."""
    with strategy.scope():
        w = tf.Variable(0.0)

    def of_replica(numbers, weights, bounds):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        shard = slice(bounds[replica], bounds[replica + 1])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((w - numbers[shard]) ** 2 * weights[shard])
        return tape.gradient(loss, w)

    @tf.function
    def step(*batch):
        return strategy.reduce("SUM", strategy.run(of_replica, args=batch), axis=None)

    some = tf.TensorSpec([None])
    return step.get_concrete_function(some, some, tf.TensorSpec([3], tf.int32))


def gradient_under_strategy(numbers, weights):
    """The gradient of sum(loss × weight) at w = 0, added up by MirroredStrategy.

    The loss of a number is (w - number)². `weights` has a list for each of two replicas.
    """
    flat = [float(weight) for shard in weights for weight in shard]
    if len(weights) != 2 or len(flat) != len(numbers):
        raise ValueError(f"expected two lists with {len(numbers)} weights in all")
    bounds = [0, len(weights[0]), len(numbers)]
    return gradient_step()(*map(tf.constant, (numbers, flat, bounds))).numpy().item()


def check_shape(kernel, expected):
    """Raise ValueError if a kernel has another shape."""
    if tuple(kernel.shape) != tuple(expected):
        raise ValueError(f"the kernel has the shape {tuple(kernel.shape)}, not {expected}")


def keras_conv(plan, images, weight, stride):
    """What ZeroPadding2D and Conv2D make of PyTorch's images (n, channels, height, width)."""
    outputs, inputs, height, width = weight.shape
    check_shape(plan["kernel"], (height, width, inputs, outputs))
    if plan["zeros"] not in range(9):
        raise ValueError(f"zeros is {plan['zeros']!r}, expected a small whole number")
    layers = tf.keras.layers
    channels_last = layers.ZeroPadding2D(plan["zeros"])(images.permute(0, 2, 3, 1).numpy())
    conv = layers.Conv2D(outputs, (height, width), stride, plan["padding"], use_bias=False)
    conv.build(channels_last.shape)
    conv.set_weights([plan["kernel"].numpy()])
    return torch.tensor(conv(channels_last).numpy()).permute(0, 3, 1, 2)


def keras_dense(kernel, images, weight):
    """What Flatten and Dense make of PyTorch's images (n, channels, height, width)."""
    check_shape(kernel, weight.T.shape)
    flat = tf.keras.layers.Flatten()(images.permute(0, 2, 3, 1).numpy())
    dense = tf.keras.layers.Dense(kernel.shape[1], use_bias=False)
    dense.build(flat.shape)
    dense.set_weights([kernel.numpy()])
    return torch.tensor(dense(flat).numpy())


# %% [markdown]
# ## 1. BatchNorm's copies: predict (3 points)
# BatchNorm keeps a moving mean and a moving variance for the evaluation. With `momentum=0.5`,
# each step computes `new = 0.5 × old + 0.5 × statistic of the rows`. A saved model has
# replica 0's copy.
#
# A model trains for 20 steps on two replicas, each time on the batch 1, 2, 3, 6: replica 0
# gets 1 and 2, replica 1 gets 3 and 6. Predict three numbers. The variance is the mean of the
# squared distances from the mean, divided by n and not by n − 1. A guess within 5% is right.

# %%
# answer: guess_norm
guess_mean = None  # replica 0's moving mean, with BatchNormalization()
guess_synchronized_mean = None  # the same, with BatchNormalization(synchronized=True)
guess_synchronized_variance = None  # replica 0's moving variance, with synchronized=True
### BEGIN SOLUTION
guess_mean = 1.5
guess_synchronized_mean = 3.0
guess_synchronized_variance = 3.5
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_norm", "moving mean of replica 0", points=1) as student:
    mean, _ = moving_statistics(synchronized=False)
    student.guess(
        "guess_mean",
        mean,
        "guess_mean is what replica 0 has after 20 steps",
        "which rows does replica 0 see, and does it get anything from replica 1?",
        within=0.05 * mean,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_norm", "moving mean, synchronized", points=1) as student:
    mean, _ = moving_statistics(synchronized=True)
    student.guess(
        "guess_synchronized_mean",
        mean,
        "guess_synchronized_mean is what replica 0 has after 20 steps",
        "with synchronized=True, each replica uses the mean of the whole batch",
        within=0.05 * mean,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_norm", "moving variance, synchronized", points=1) as student:
    _, variance = moving_statistics(synchronized=True)
    student.guess(
        "guess_synchronized_variance",
        variance,
        "guess_synchronized_variance is what replica 0 has after 20 steps",
        "the distances are those from the mean of the whole batch, not of a shard",
        within=0.05 * variance,
    )

# %% [markdown]
# ## 2. The weight of each image (6 points)
# The strategy adds up the replicas' gradients. So each image gets a weight, and a replica's
# loss is the sum of loss × weight over its shard. Write two functions:
#
# - `sample_weights(batch, replicas)` returns a list for each replica, with the weight of each
#   image of its shard. `batch` is the number of images of this global batch. TensorFlow's
#   shards have one size, rounded up, until no image is left: 10 images on 4 replicas become
#   3, 3, 3, 1, and 5 images become 2, 2, 1, 0.
# - `replica_loss(losses, weights)` returns one replica's loss. Both are lists of numbers.
#
# The losses of all replicas must add up to the mean over the batch. With other weights there
# is no error, but the gradient has another length, or another direction.


# %%
# answer: sample_weights
def sample_weights(batch, replicas):
    """The weights of the images, a list for each replica."""
    ### BEGIN SOLUTION
    size = -(-batch // replicas)
    shards = [
        range(batch)[size * replica : size * (replica + 1)] for replica in range(replicas)
    ]
    return [[1 / batch] * len(shard) for shard in shards]
    ### END SOLUTION


def replica_loss(losses, weights):
    """A replica's loss, from the losses and weights of its images."""
    ### BEGIN SOLUTION
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    ### END SOLUTION


# %%
with exercise.check("sample_weights", "sizes of the shards", points=1) as student:
    for batch, sizes in ((4, [1, 1, 1, 1]), (10, [3, 3, 3, 1]), (5, [2, 2, 1, 0])):
        weights = student.call("sample_weights", batch, 4)
        got = [len(shard) for shard in weights]
        student.equal(got, sizes, f"{batch} images on 4 replicas have the shards {sizes}")
        counts = all(weight > 0 for shard in weights for weight in shard)
        student.expect(counts, f"each of {batch} images has a weight above 0")

# %%
with exercise.check("sample_weights", "gradient under MirroredStrategy", points=2) as student:
    for numbers in ([1.0, 2.0, 3.0, 6.0], [1.0, 2.0, 6.0]):
        weights = student.call("sample_weights", len(numbers), 2)
        words = ", ".join(f"{number:g}" for number in numbers)
        student.close_to(
            gradient_under_strategy(numbers, weights),
            -6.0,
            f"the gradient for {words} on two replicas is that of one device",
        )

# %%
with exercise.check("sample_weights", "loss of a replica", points=1) as student:
    got = student.call("replica_loss", [1.0, 3.0, 5.0], [0.5, 0.25, 0.0])
    student.close_to(got, 1.25, "replica_loss is the sum of loss × weight")
    got = student.call("replica_loss", [], [])
    student.close_to(got, 0.0, "a replica without an image has the loss 0")

# %%
with exercise.check("sample_weights", "other batches", points=2, hidden=True) as student:
    several = student.random.randint(5, 8)
    got, expected, counted, equally = [], [], [], []
    for replicas, times in ((3, student.random.randint(2, 9)), (several, 2), (several, 1)):
        batch = replicas * times + 1
        shards = torch.arange(batch).split(-(-batch // replicas))
        sizes = [len(shard) for shard in shards] + [0] * (replicas - len(shards))
        weights = student.call("sample_weights", batch, replicas)
        got.append([len(shard) for shard in weights])
        expected.append(sizes)
        counted += [weight for shard in weights for weight in shard]
        equally += [1 / batch] * batch
    student.equal(got, expected, "the shards are TensorFlow's")
    student.close_to(counted, equally, "each image counts equally")
    losses = torch.rand(6, generator=student.generator).tolist()
    weights = torch.rand(6, generator=student.generator).tolist()
    student.close_to(
        student.call("replica_loss", losses, weights),
        torch.dot(torch.tensor(losses), torch.tensor(weights)).item(),
        "replica_loss is the sum of loss × weight, also for other numbers",
    )

# %% [markdown]
# ## 3. PyTorch's weights in Keras (5 points)
# The CNN of lesson 07 begins with PyTorch's weights. Write two functions that return what the
# Keras layers need:
#
# - `conv(weight, padding)` for `nn.Conv2d(…, padding=padding)` with any stride. `weight` has
#   the shape (out, in, height, width). Return a dict: `"kernel"`, the weight of `Conv2D`,
#   (height, width, in, out); `"zeros"`, the number for a `ZeroPadding2D` in front of it; and
#   `"padding"`, the word for `Conv2D(padding=…)`, `"same"` or `"valid"`.
# - `dense(weight, image)` for the linear layer that follows `flatten`. `weight` has the shape
#   (out, in); `image`, the (channels, height, width) of what `flatten` reads. Return the
#   weight of `Dense`, (in, out).
#
# Keras's images have the channels last, and its `flatten` reads them in this order. The checks
# build both layers and give them the same images. A wrong weight of the right shape makes no
# error: the model only learns worse, or from other first weights.


# %%
# answer: to_keras
def conv(weight, padding):
    """The settings of ZeroPadding2D and Conv2D: kernel, zeros, padding."""
    ### BEGIN SOLUTION
    # "same" pads one side only, at a stride of 2 and an even size.
    return {"kernel": weight.permute(2, 3, 1, 0), "zeros": padding, "padding": "valid"}
    ### END SOLUTION


def dense(weight, image):
    """The kernel of Dense after Flatten."""
    ### BEGIN SOLUTION
    by_channel = weight.unflatten(1, image)
    return by_channel.permute(2, 3, 1, 0).flatten(0, 2)
    ### END SOLUTION


# %%
with exercise.check("to_keras", "convolution, stride 1", points=1) as student:
    weight = torch.arange(2.0 * 3 * 3 * 3).cos().reshape(2, 3, 3, 3)
    images = torch.arange(2.0 * 3 * 8 * 8).sin().reshape(2, 3, 8, 8)
    plan = student.call("conv", weight, 1)
    student.close_to(
        keras_conv(plan, images, weight, stride=1),
        torch.nn.functional.conv2d(images, weight, padding=1),
        "the same images give the same numbers at stride 1",
        rtol=1e-4,
        atol=1e-4,
    )

# %%
with exercise.check("to_keras", "convolution, stride 2", points=1) as student:
    weight = torch.arange(2.0 * 3 * 3 * 3).cos().reshape(2, 3, 3, 3)
    images = torch.arange(2.0 * 3 * 8 * 8).sin().reshape(2, 3, 8, 8)
    plan = student.call("conv", weight, 1)
    student.close_to(
        keras_conv(plan, images, weight, stride=2),
        torch.nn.functional.conv2d(images, weight, stride=2, padding=1),
        "the same images give the same numbers at stride 2",
        rtol=1e-4,
        atol=1e-4,
    )

# %%
with exercise.check("to_keras", "dense after flatten", points=1) as student:
    weight = torch.arange(4.0 * 3 * 2 * 2).cos().reshape(4, 12)
    images = torch.arange(2.0 * 3 * 2 * 2).sin().reshape(2, 3, 2, 2)
    kernel = student.call("dense", weight, (3, 2, 2))
    student.close_to(
        keras_dense(kernel, images, weight),
        images.flatten(1) @ weight.T,
        "the same images give the same numbers after flatten",
        rtol=1e-4,
        atol=1e-4,
    )

# %%
with exercise.check("to_keras", "other convolutions", points=1, hidden=True) as student:
    for padding in (0, 2):
        outputs, inputs = student.random.sample(range(2, 6), 2)
        kernel_size, stride = (3 + padding, 3), student.random.randint(1, 3)
        weight = torch.randn(outputs, inputs, *kernel_size, generator=student.generator)
        images = torch.randn(2, inputs, 9, 8, generator=student.generator)
        student.close_to(
            keras_conv(student.call("conv", weight, padding), images, weight, stride),
            torch.nn.functional.conv2d(images, weight, stride=stride, padding=padding),
            f"padding {padding}: the same images give the same numbers",
            rtol=1e-4,
            atol=1e-4,
        )

# %%
with exercise.check("to_keras", "other dense layers", points=1, hidden=True) as student:
    image = student.random.sample(range(2, 6), 3)
    images = torch.randn(2, *image, generator=student.generator)
    weight = torch.randn(3, images[0].numel(), generator=student.generator)
    student.close_to(
        keras_dense(student.call("dense", weight, image), images, weight),
        images.flatten(1) @ weight.T,
        "images that are no squares give the same numbers after flatten",
        rtol=1e-4,
        atol=1e-4,
    )

# %% [markdown]
# ## 4. Synchronized, but not one device: find the bug (6 points)
# Somebody wrote a BatchNorm that is synchronized. Here each replica is a process of PyTorch,
# because the checks can then see what it sends. `all_reduce` plays
# `tf.distribute.get_replica_context().all_reduce("SUM", tensor)`.

# %%
# given
import torch
import torch.distributed as dist


def all_reduce(tensor):
    """The sum of this tensor over all replicas. All replicas call it."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def broken_batch_norm(rows, moving_mean, moving_variance, momentum=0.9):
    """One step. Returns the normalised rows, and the new moving mean and variance."""
    replicas = dist.get_world_size()
    mean = all_reduce(rows.mean(0)) / replicas
    variance = all_reduce(rows.var(0, unbiased=False)) / replicas
    normalised = (rows - mean) / (variance + 1e-3).sqrt()
    return (
        normalised,
        momentum * moving_mean + (1 - momentum) * mean,
        momentum * moving_variance + (1 - momentum) * variance,
    )


# %% [markdown]
# **What people see.** The copies are equal on all replicas, so it looks right. But the losses
# are not those of one device: by a little if all shards have the same size and similar rows,
# by much if the replicas read different files. For the rows 1, 2 on replica 0 and 3, 6 on
# replica 1, question 1 has the right variance.
#
# Write `batch_norm`, which computes on any number of replicas what one device computes for the
# whole batch. The shards can have different sizes; none is empty. It may send sums over a
# shard, but not the rows: for rows with c columns, at most 2c + 1 numbers per replica. To try
# the broken one, let your function return `broken_batch_norm(rows, …)` first, and run the
# checks.


# %%
# answer: batch_norm
def batch_norm(rows, moving_mean, moving_variance, momentum=0.9):
    """One step. Returns the normalised rows, and the new moving mean and variance.

    rows is this replica's shard, (rows, columns). The moving statistics have the shape
    (columns,), and divide by n, the number of rows of all replicas.
    """
    ### BEGIN SOLUTION
    count = torch.tensor([float(len(rows))])
    columns = rows.shape[1]
    sums = all_reduce(torch.cat([count, rows.sum(0), (rows**2).sum(0)]))
    mean = sums[1 : 1 + columns] / sums[0]
    variance = sums[1 + columns :] / sums[0] - mean**2
    normalised = (rows - mean) / (variance + 1e-3).sqrt()
    return (
        normalised,
        momentum * moving_mean + (1 - momentum) * mean,
        momentum * moving_variance + (1 - momentum) * variance,
    )
    ### END SOLUTION


# %%
with exercise.check("batch_norm", "even shards", points=2) as student:
    shards = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [6.0]])]
    start = [torch.zeros(1), torch.ones(1)]
    run = student.ranks("batch_norm", [[shard, *start] for shard in shards])
    rows = torch.cat(shards)
    variance = rows.var(0, unbiased=False)
    outputs = torch.cat([value[0] for value in run.values])
    student.close_to(
        outputs,
        (rows - rows.mean(0)) / (variance + 1e-3).sqrt(),
        "the normalised rows are those of one device",
        rtol=1e-3,
        atol=1e-3,
    )
    means, variances = ([value[place] for value in run.values] for place in (1, 2))
    expected = 0.1 * rows.mean(0)
    student.close_to(means, [expected] * 2, "both moving means are one device's")
    expected = 0.9 + 0.1 * variance
    student.close_to(
        variances, [expected] * 2, "both moving variances are those of one device"
    )

# %%
with exercise.check("batch_norm", "uneven shards", points=1) as student:
    shards = [torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[9.0]])]
    start = [torch.zeros(1), torch.ones(1)]
    run = student.ranks("batch_norm", [[shard, *start] for shard in shards])
    student.close_to(
        [value[1] for value in run.values],
        [torch.cat(shards).mean(0) * 0.1] * 2,
        "both moving means are those of one device, with 3 rows and 1 row",
    )

# %%
with exercise.check("batch_norm", "what is sent", points=1) as student:
    rows = torch.arange(20.0).sin().reshape(20, 1)
    start = [torch.zeros(1), torch.ones(1)]
    run = student.ranks("batch_norm", [[shard, *start] for shard in rows.chunk(2)])
    student.close_to(
        [value[2] for value in run.values],
        [0.9 + 0.1 * rows.var(0, unbiased=False)] * 2,
        "both moving variances are those of one device",
    )
    numbers = [sum(t.numel() for call in calls for t in call.tensors) for calls in run.calls]
    student.expect(
        min(numbers) > 0 and max(numbers) <= 3,
        "each replica sends sums over its shard: at most 2c + 1 numbers, c columns",
        f"the replicas send {numbers} numbers, for 10 rows with one column each",
    )

# %%
with exercise.check("batch_norm", "other shards", points=2, hidden=True) as student:
    replicas = student.random.randint(3, 4)
    columns = student.random.randint(2, 5)
    shards = [
        student.random.uniform(-2, 2)
        + torch.randn(student.random.randint(1, 6), columns, generator=student.generator)
        for _ in range(replicas)
    ]
    start = [torch.rand(columns, generator=student.generator) for _ in range(2)]
    run = student.ranks("batch_norm", [[shard, *start] for shard in shards])
    rows = torch.cat(shards)
    mean, variance = rows.mean(0), rows.var(0, unbiased=False)
    expected = [(shard - mean) / (variance + 1e-3).sqrt() for shard in shards]
    student.close_to(
        [value[0] for value in run.values],
        expected,
        "the normalised rows are those of one device, with more replicas and columns",
        rtol=1e-3,
        atol=1e-3,
    )
    student.close_to(
        [value[1:] for value in run.values],
        [[0.9 * start[0] + 0.1 * mean, 0.9 * start[1] + 0.1 * variance]] * replicas,
        "all moving statistics are those of one device",
        rtol=1e-3,
        atol=1e-3,
    )

# %%
exercise.summary()
