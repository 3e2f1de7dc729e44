# %% [markdown]
# # 07 · TensorFlow: MirroredStrategy, the loop by hand
# **The question.** `fit` hides the training loop. What does that loop do on two replicas: who
# adds up what, and where?
#
# You need the first notebook of this lesson, which explains strategy, scope, mirrored
# variable, per-replica value and sample weight. You need no GPU. The first cell starts
# TensorFlow, which takes about ten seconds.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import time
from collections.abc import Callable

from multigpu import data, files, flags, launch, metrics, tf_common
from multigpu.tf_common import tf  # TensorFlow, without the messages of its start


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "TF_CNN_CustomLoop",
        "Train a CNN with MirroredStrategy and a loop by hand.",
    )
    parser.add_argument(
        "--devices",
        type=flags.positive,
        help="replicas (default: all GPUs, or two logical devices of the CPU)",
    )
    return parser.parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import torch
# import torch.nn.functional as F
#
# from multigpu import lesson, plots
# from multigpu.models import CNN
#
# torch.set_num_threads(1)  # in such a small model, more threads wait for each other
# lesson.setup("07-mirrored-strategy")
# from experiments import batch_norm_step
#
# devices = tf_common.devices(2)  # two GPUs, or two logical devices of the CPU
# strategy = tf.distribute.MirroredStrategy(devices)
# train, test = data.load(data.fetch(None))
# images, labels = tf_common.tensors(train)
# settings = {"batch_size": 64, "seed": 0}

# %% [markdown]
# ## Two contexts
# A function that `strategy.run` calls is in a *replica context*: it runs once for each
# replica, knows the replica's number, and may take part in an
# [all-reduce](../lessons/README.md#all-reduce). Outside, in the *cross-replica context*, the
# code sees the values of all replicas at once, and may reduce them. Here each replica returns
# its number, counted from 1: replica 0 has 1.0, replica 1 has 2.0.

# %% tags=["active-ipynb"]
# def inside():
#     context = tf.distribute.get_replica_context()
#     number = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)  # 1.0 or 2.0
#     return number, context.all_reduce("SUM", number)
#
#
# @tf.function  # compiles a graph of all replicas
# def run_inside():
#     return strategy.run(inside)
#
#
# def values(per_replica):
#     copies = strategy.experimental_local_results(per_replica)
#     return [value.numpy().item() for value in copies]
#
#
# number, total = run_inside()
# print("inside: the replicas have", values(number), "and each gets the sum", values(total))
#
# reduced = [strategy.reduce(how, number, axis=None).numpy().item() for how in ("SUM", "MEAN")]
# print("outside: reduce gives the sum and the mean,", reduced)

# %% [markdown]
# ## Design the model, and open the scope
# `tf_common.cnn` makes the first notebook's model, layer by layer the same. The model and the
# optimizer's state are made in the scope, so they are mirrored. The rest of the loop needs no
# scope.


# %%
def make(
    strategy: tf.distribute.Strategy,
    args: argparse.Namespace,
    shape: tuple[int, int, int],
    classes: int,
) -> tuple[tf.keras.Model, tf.keras.optimizers.Optimizer]:
    """The model and its optimizer, with a copy of each variable on each replica."""
    with strategy.scope():
        model = tf_common.cnn(shape, classes, args.seed)
        optimizer = tf.keras.optimizers.SGD(args.lr, momentum=0.9)
        optimizer.build(model.trainable_variables)
    return model, optimizer


# %% [markdown]
# ## Read in the data
# One epoch of **global** batches, in PyTorch's order. The strategy will divide each into
# shards, one for each replica. Images and labels are tensors in main memory: arrays would be
# copied into the graph of `map`, whose limit is 2 GiB.


# %%
def read_data(
    images: tf.Tensor,
    labels: tf.Tensor,
    epoch: int,
    batch_size: int,
    seed: int,
) -> tf.data.Dataset:
    """Batches of (images, labels, sample weights): each is one over the batch's images."""

    def gather(numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        sample_weight = 1 / tf.cast(tf.size(numbers), tf.float32)
        sample_weights = tf.fill(tf.shape(numbers), sample_weight)
        return tf.gather(images, numbers), tf.gather(labels, numbers), sample_weights

    order = tf_common.epoch_order(len(labels), epoch, seed)
    numbers = tf.data.Dataset.from_tensor_slices(order).batch(batch_size)
    return numbers.map(gather).prefetch(tf.data.AUTOTUNE)


# %% [markdown]
# ## Train
# `strategy.run` calls `replica_step` once for each replica, with its shard. `apply_gradients`
# adds the gradients up over the replicas before it changes a variable: an all-reduce, with the
# **sum**. `tf.function` makes one graph of the whole step.


# %%
def train_step(
    strategy: tf.distribute.Strategy,
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
) -> Callable[[tuple], tf.Tensor]:
    """A function that trains on one global batch and returns the sum of its images' losses."""
    cross_entropy = tf.keras.losses.sparse_categorical_crossentropy

    def replica_step(
        images: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor
    ) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = cross_entropy(labels, logits, from_logits=True)
            loss = tf.reduce_sum(losses * sample_weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return tf.reduce_sum(losses)

    @tf.function(reduce_retracing=True)
    def step(shards: tuple) -> tf.Tensor:
        losses = strategy.run(replica_step, args=shards)
        return strategy.reduce("SUM", losses, axis=None)

    return step


def train_epoch(
    strategy: tf.distribute.Strategy,
    step: Callable[[tuple], tf.Tensor],
    batches: tf.data.Dataset,
) -> list[float]:
    """Train for one epoch. Returns, for each step, what `step` returns."""
    distributed = strategy.experimental_distribute_dataset(batches)
    losses = [step(shards) for shards in distributed]
    # Only now: float() waits until the device has computed the number.
    return [float(loss) for loss in losses]


# %% [markdown]
# **The trap in the loss.** The strategy adds up; it does not average. So each image has the
# sample weight 1 / (images of the *global* batch). With 1 / (images of its own shard), the
# gradient is twice as large. How far is the training then from that of one device? Write your
# answer, then run the cell. The cells below compare it with what happens.

# %% tags=["active-ipynb", "guess"]
# # Each replica's loss is the mean over its shard. In an epoch (one device begins at 2.3):
# guess_away = 0.1  # the largest difference from one device's loss

# %% [markdown]
# One epoch of each, and one epoch on one device, in about five seconds:

# %% tags=["active-ipynb"]
# lesson.need(guess_away)
#
#
# def losses_of(*epochs, lr=0.05, kind=tf.keras.optimizers.SGD, **options):
#     """The mean loss of each step. An epoch is a data set."""
#     with strategy.scope():
#         model = tf_common.cnn()
#         optimizer = kind(lr, **options)
#         optimizer.build(model.trainable_variables)
#     step = train_step(strategy, model, optimizer)
#     sums = [total for batches in epochs for total in train_epoch(strategy, step, batches)]
#     sizes = ([64] * 22 + [29]) * len(epochs)
#     return [total / size for total, size in zip(sums, sizes)]
#
#
# def by_own_shard(images, labels, sample_weights):
#     """Sample weights 1 / own shard: of 29 images, 15 have 1 / 15, and 14 have 1 / 14."""
#     rows = tf.size(labels)  # the strategy will give replica 0 the first half, rounded up
#     first = (rows + 1) // 2
#     own = tf.where(tf.range(rows) < first, first, rows - first)
#     return images, labels, 1 / tf.cast(own, tf.float32)
#
#
# sgd = {"momentum": 0.9}
# batches = read_data(images, labels, 0, **settings)
# right = losses_of(batches, **sgd)
# wrong = losses_of(batches.map(by_own_shard), **sgd)
# alone = tf_common.train_serially(tf_common.cnn(), train, epochs=1, lr=0.05, **settings)

# %% tags=["active-ipynb"]
# def largest_difference(losses, others):
#     return max(abs(a - b) for a, b in zip(losses, others))
#
#
# equal = largest_difference(right, alone) < 1e-5
# print("1 / global batch: the losses are one device's within 1e-5:", equal)
# away = largest_difference(wrong, alone)
# lesson.compare("largest difference of the losses", guess_away, away, digits=1)

# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# curves = {"one device": alone, "1 / global batch": right, "1 / own shard": wrong}
# title = f"With 1 / own shard, the losses get up to {away:.1f} away from one device's"
# plots.lines(
#     range(1, 24),
#     curves,
#     "step",
#     "mean loss of the batch",
#     title,
#     level=None,
#     powers=False,
#     dashed="1 / global batch",
# )

# %% [markdown]
# Here the loss falls faster with the wrong rule. Is it the right rule at twice the rate, 0.1?

# %% tags=["active-ipynb"]
# doubled = losses_of(batches, lr=0.1, **sgd)
# equal = largest_difference(wrong, doubled) < 1e-5
# print("1 / own shard: the losses of 1 / global batch at a rate of 0.1, within 1e-5:", equal)

# %% [markdown]
# It is, for the 22 batches with even shards; no loss here shows the last update. The end of
# this notebook tries a larger rate.
#
# **The trap in the scope.** The model is made inside, the optimizer outside. Its momentum then
# has one copy. The cell trains for one step.

# %% tags=["active-ipynb", "guess"]
# # The optimizer is made outside the scope. After a step, the copies of a weight:
# guess_optimizer = "error"  # are they "equal" or "apart", or is there an "error"?

# %% tags=["active-ipynb"]
# choices = ("error", "equal", "apart")
# lesson.need(guess_optimizer, choices=choices)
# model, _ = make(strategy, parse([]), (1, 8, 8), 10)
# outside = tf.keras.optimizers.SGD(0.05, momentum=0.9)
# outside.build(model.trainable_variables)
#
#
# def copies():
#     """Both copies of the last layer's kernel."""
#     kernel = model.trainable_variables[-2].value
#     return [copy.numpy() for copy in strategy.experimental_local_results(kernel)]
#
#
# before, _ = copies()
# try:
#     step = train_step(strategy, model, outside)
#     train_epoch(strategy, step, batches.take(1))
#     first, second = copies()
#     result = "equal" if (first == second).all() else "apart"
# except Exception:
#     result = "error"
# lesson.compare("the copies", guess_optimizer, result, choices=choices)

# %% [markdown]
# Why? The number that has changed most shows it. Then the cell trains for an epoch more.

# %% tags=["active-ipynb"]
# place = abs(first - before).argmax()
# changes = [(copy - before).flat[place] for copy in (first, second)]
# print("after a step, a weight's copies have changed by {:.5f}, {:.5f}".format(*changes))
# print(f"the momentum has one copy: {outside.variables[-2].numpy().flat[place]:.5f}")
#
# train_epoch(strategy, step, batches)
# first, second = copies()
# largest = abs(first - second).max()
# print(f"after an epoch more, the copies of a weight are up to {largest:.2f} apart")

# %% [markdown]
# Both replicas add to the one momentum in turn: the second change is 1.9 times the first,
# 0.9 × the momentum and the gradient again. Without `build`, the first step makes the
# momentum, and there is an error, `Mixing different tf.distribute.Strategy objects`
# (`test_an_optimizer_that_is_not_built_outside_is_an_error` in
# `tests/lessons/test_lesson07.py`).
#
# **BatchNorm** normalises by the mean and the variance of the rows that it sees, and keeps a
# *moving mean* for evaluation. Two replicas divide 64 images, and each has a copy of the
# moving mean:

# %% tags=["active-ipynb", "guess"]
# guess_norm = "equal"  # BatchNorm's moving mean after a step: copies "equal" or "apart"?

# %% tags=["active-ipynb"]
# lesson.need(guess_norm, choices=("equal", "apart"))
# batch = images[:64].numpy(), labels[:64].numpy()
# one_device = tf.distribute.get_strategy()  # TensorFlow's default strategy
# serial, _ = batch_norm_step(one_device, *batch)
# found = {}
# for synchronized in (False, True):
#     gradient, copies = batch_norm_step(strategy, *batch, synchronized=synchronized)
#     found[synchronized] = abs(copies[0] - copies[1]).max()
#     away = abs(gradient - serial).max()
#     print(f"synchronized={synchronized}: the gradient is {away:.4f} away from one device's,")
#     print(f"    the copies of the moving mean are {found[synchronized]:.4f} apart")
# result = "equal" if found[False] == 0 else "apart"
# lesson.compare("copies of the moving mean", guess_norm, result, choices=("equal", "apart"))

# %% [markdown]
# Each replica sees its own 32 images. The gradients are added up, but nothing adds up the
# moving means: each replica updates its own copy. A saved model has replica 0's copy. With
# `BatchNormalization(synchronized=True)` each replica normalises by the mean and the variance
# of all 64 images.
#
# ## Evaluate
# Each replica counts its hits, and `reduce` adds them up. The test images are padded so that
# every replica gets some; padding has sample weight 0.


# %%
def test_step(
    strategy: tf.distribute.Strategy, model: tf.keras.Model
) -> Callable[[tuple], tf.Tensor]:
    """A function that returns the number of hits in a batch.

    Make it once: each new tf.function is traced again.
    """

    def replica_step(
        images: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor
    ) -> tf.Tensor:
        right = tf.argmax(model(images), axis=1) == labels
        return tf.reduce_sum(tf.cast(right & (sample_weights > 0), tf.float32))

    @tf.function
    def step(shards: tuple) -> tf.Tensor:
        counts = strategy.run(replica_step, args=shards)
        return strategy.reduce("SUM", counts, axis=None)

    return step


def hits(
    strategy: tf.distribute.Strategy,
    step: Callable[[tuple], tf.Tensor],
    test: tf.data.Dataset,
) -> float:
    """The number of test images that are classified correctly."""
    distributed = strategy.experimental_distribute_dataset(test)
    counts = [step(shards) for shards in distributed]
    return sum(float(count) for count in counts)


# %% [markdown]
# ## All together
# `main` calls the functions above. Unlike lesson 05, this is one process: it has no rank and
# no process group. `check_shards` reports a last batch that has no image for a replica.


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    launch.single_process_world("TF_CNN_CustomLoop")
    devices = tf_common.devices(args.devices, exact=args.prove)
    replicas = len(devices)
    batch_size = flags.split_batch(args.batch_size, replicas, who="replica").global_size
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    tf_common.check_shards(len(train), batch_size, replicas)
    print(f"{tf_common.describe(devices)}\n\n{metrics.header()}", flush=True)

    strategy = tf.distribute.MirroredStrategy(devices)
    shape = tuple(train[0][0].shape)
    classes = data.num_classes(train, test)
    model, optimizer = make(strategy, args, shape, classes)
    step = train_step(strategy, model, optimizer)
    count = test_step(strategy, model)
    images, labels = tf_common.tensors(train)
    test_batches = tf_common.padded_batches(test, 256, replicas)

    history = []
    for epoch in range(args.epochs):
        began = time.perf_counter()
        batches = read_data(images, labels, epoch, batch_size, args.seed)
        loss = sum(train_epoch(strategy, step, batches)) / len(train)
        images_per_s = len(train) / (time.perf_counter() - began)
        metrics.check_loss(loss, epoch, launch.World())

        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": hits(strategy, count, test_batches) / len(test),
            "images_per_s": images_per_s,
        }
        print(metrics.row(row), flush=True)
        history.append(row)

    with files.atomic(args.out / "model.keras") as temporary:
        model.save(temporary)

    verdict = None
    if args.prove:
        verdict = tf_common.compare_with_serial(
            f"custom loop on {replicas} replicas equals one device",
            model,
            tf_common.cnn(shape, classes, args.seed),
            train,
            epochs=args.epochs,
            batch_size=batch_size,
            lr=args.lr,
            seed=args.seed,
        )
    metrics.report(
        args.out,
        launch.World(),
        tf_common.torch_device(devices),
        history,
        verdict,
        devices=replicas,
        batch_size=batch_size,
    )


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# A new process, ten epochs, and the proof, in about 15 seconds:

# %% tags=["active-ipynb"]
# !python ../scripts/TF_CNN_CustomLoop.py --prove --out results/07-loop

# %% tags=["active-ipynb"]
# print(metrics.route_row("07 MirroredStrategy, by hand", "results/07-loop"))

# %% [markdown]
# **Who adds up what, and where?**
# - In the replica context, each replica computes the loss and the gradients of its shard.
#   `apply_gradients` adds the gradients up over the replicas, and each replica updates its
#   own copy of the weights.
# - In the cross-replica context, `reduce` adds up the replicas' losses and hits, which the
#   table shows.
# - Nothing adds up BatchNorm's moving means, unless `synchronized=True`.
#
# ## To go further
# The lesson's answer ends here. Does PyTorch learn the same? What does the trap in the loss do
# with a larger rate, and with Adam?
#
# **The same in PyTorch.** Lesson 01's model and loop in PyTorch, and TensorFlow on one device,
# for ten epochs, from the same weights, with the same images in the same order (about five
# seconds):

# %% tags=["active-ipynb", "guess"]
# # A loss is equal if both differ by less than 1e-5.
# guess_steps = 20  # PyTorch and TensorFlow: for how many of 230 steps are the losses equal?

# %% tags=["active-ipynb"]
# lesson.need(guess_steps)
# torch.manual_seed(0)
# model = CNN()
# optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# pytorch = []
# for epoch in range(10):
#     order = torch.as_tensor(tf_common.epoch_order(len(train), epoch, seed=0))
#     for batch in order.split(64):
#         x, y = train[batch]
#         optimizer.zero_grad()
#         loss = F.cross_entropy(model(x), y)
#         loss.backward()
#         optimizer.step()
#         pytorch.append(loss.item())
#
# tensorflow = tf_common.train_serially(tf_common.cnn(), train, epochs=10, lr=0.05, **settings)
# for step in range(3):
#     print(f"step {step + 1}: PyTorch {pytorch[step]:.5f}, TensorFlow {tensorflow[step]:.5f}")
# equal = [abs(a - b) < 1e-5 for a, b in zip(tensorflow, pytorch)]
# lesson.compare("steps with equal losses, within 1e-5", guess_steps, sum(equal), digits=0)

# %% [markdown]
# [Which call is which](../lessons/07-mirrored-strategy/pytorch-tensorflow.md) lists the
# differences between the two.
#
# **The trap in the loss, at a rate of 0.3**, for ten epochs:

# %% tags=["active-ipynb", "guess"]
# guess_larger = "fall"  # with 1 / own shard, does the loss "fall" or "grow"?

# %% tags=["active-ipynb"]
# lesson.need(guess_larger, choices=("fall", "grow"))
#
#
# def of_epochs(losses):
#     """The mean of each epoch's 23 losses."""
#     return tf.reduce_mean(tf.reshape(losses, (10, 23)), axis=1).numpy()
#
#
# epochs = [read_data(images, labels, epoch, **settings) for epoch in range(10)]
# own_shards = [batches.map(by_own_shard) for batches in epochs]
# wrong = of_epochs(losses_of(*own_shards, lr=0.3, **sgd))
# losses = tf_common.train_serially(tf_common.cnn(), train, epochs=10, lr=0.3, **settings)
# alone = of_epochs(losses)
# print("one device: the loss falls to less than a tenth:", alone[-1] < alone[0] / 10)
# result = "grow" if wrong[-1] > wrong[0] else "fall"
# lesson.compare("1 / own shard, the loss", guess_larger, result, choices=("fall", "grow"))

# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# curves = {"one device": alone, "1 / own shard": wrong}
# title = f"Rate 0.3: the loss grows to {max(wrong):.0f} with 1 / own shard"
# axes = ("epoch", "mean loss")
# plots.lines(range(1, 11), curves, *axes, title, level=None, powers=False)

# %% [markdown]
# The gradient is twice as large. So a rate that one device can use can be too large.
#
# **The trap in the loss, with Adam.** One epoch, with both rules:

# %% tags=["active-ipynb", "guess"]
# guess_adam = 1  # how far apart are the losses of both rules, at most?

# %% tags=["active-ipynb"]
# lesson.need(guess_adam)
# adam = {"lr": 0.001, "kind": tf.keras.optimizers.Adam}
# right = losses_of(batches, **adam)
# wrong = losses_of(batches.map(by_own_shard), **adam)
# away = largest_difference(wrong, right)
# lesson.compare("Adam, largest difference", guess_adam, away, digits=4)

# %% [markdown]
# Adam divides a gradient by its usual size, which doubles, too. So the mistake is hard to see.

# %% [markdown] tags=["footer"]
# [← 07 MirroredStrategy](TF_CNN_MultiGPU.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/07-mirrored-strategy/README.md) ·
# [08 TensorFlow on several nodes →](TF_CNN_MultiNode.ipynb)
