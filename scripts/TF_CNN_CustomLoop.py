# %% [markdown]
# # 07 · TensorFlow: MirroredStrategy, the loop by hand
# **The question.** `fit` does it all. What does it do on two replicas: who averages what, and where?
#
# **Predict first.** (1) Each replica takes the mean loss over its own piece, as one does on one GPU. What is wrong with
# the step? (2) Inside `strategy.run`, what does a replica see of the others? (3) PyTorch and TensorFlow start from the
# same weights and take the same images in the same order. After how many steps do their losses differ in the fifth digit?

# %%
import argparse
import time
from collections.abc import Callable

from multigpu import data, files, flags, launch, metrics, tf_common
from multigpu.tf_common import tf  # TensorFlow, without the messages of its start


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "TF_CNN_CustomLoop", "Train a CNN with MirroredStrategy and a loop by hand."
    )
    parser.add_argument(
        "--devices",
        type=flags.positive,
        help="replicas (default: all GPUs, or two parts of the CPU)",
    )
    return parser.parse_args(arguments)


# %% tags=["active-ipynb"]
# from multigpu import plots
# places = tf_common.devices(2)
# strategy = tf.distribute.MirroredStrategy(places)
# args, (train, test) = parse(["--batch-size", "64"]), data.load(data.fetch(None))
# images, labels = tf_common.tensors(train)
# print(strategy.num_replicas_in_sync, "replicas")

# %% [markdown]
# ## Two contexts
# In `strategy.run` the code is one replica's (**replica context**): it knows its number, and may take part in an
# all-reduce. Outside (**cross-replica context**) one sees the values of all replicas at once, and may reduce them.

# %% tags=["active-ipynb"]
# @tf.function
# def within():
#     context = tf.distribute.get_replica_context()
#     mine = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
#     return mine, context.all_reduce("SUM", mine)
#
#
# def numbers(values):
#     return [value.numpy().item() for value in strategy.experimental_local_results(values)]
#
#
# mine, of_all = strategy.run(within)
# print("within: the replicas have", numbers(mine), "and all-reduce gives each", numbers(of_all))
# print("outside: reduce gives", [strategy.reduce(how, mine, axis=None).numpy().item() for how in ("SUM", "MEAN")])

# %% [markdown]
# **Who adds up?** NCCL between GPUs, the default there; copies in a hierarchy; or all to one device, and back.

# %% tags=["active-ipynb"]
# for way in (tf.distribute.NcclAllReduce, tf.distribute.HierarchicalCopyAllReduce, tf.distribute.ReductionToOneDevice):
#     other = tf.distribute.MirroredStrategy(places, cross_device_ops=way())
#     try:
#         print(f"{way.__name__}: {numbers(other.run(within)[1])}")
#     except tf.errors.InvalidArgumentError:
#         print(f"{way.__name__}: refused, it is for GPUs alone")

# %% [markdown]
# ## Step 1 · Design the model · Step 2 · Open the scope
# The model and the optimizer's state are made in the scope, so they are mirrored. The rest is plain code.


# %%
def make(
    strategy: tf.distribute.Strategy, args: argparse.Namespace, shape: tuple, classes: int
):
    """The model and its optimizer, a copy of each variable on each replica."""
    with strategy.scope():
        model = tf_common.cnn(shape, classes, args.seed)
        optimizer = tf.keras.optimizers.SGD(args.lr, momentum=0.9)
        optimizer.build(model.trainable_variables)
    return model, optimizer


# %% [markdown]
# ## Step 3 · Read in the data
# One epoch of **global** batches, in PyTorch's order. The strategy will cut each into pieces, one a replica. Images and
# labels are tensors in main memory: arrays would be copied into the graph of `map`, which ends at 2 GiB.


# %%
def read_data(
    images: tf.Tensor, labels: tf.Tensor, epoch: int, args: argparse.Namespace
) -> tf.data.Dataset:
    """Batches of images, labels and weights: an image weighs one over the images of its global batch."""

    def batch(numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        weights = tf.fill(tf.shape(numbers), 1 / tf.cast(tf.size(numbers), tf.float32))
        return tf.gather(images, numbers), tf.gather(labels, numbers), weights

    order = tf_common.order(len(labels), epoch, args.seed)
    return (
        tf.data.Dataset.from_tensor_slices(order)
        .batch(args.batch_size)
        .map(batch)
        .prefetch(tf.data.AUTOTUNE)
    )


# %% [markdown]
# ## Step 4 · Train
# `strategy.run` calls `replica_step` once for each replica, with its piece. `apply_gradients` adds the gradients up over
# the replicas before it changes a variable: an all-reduce, with the **sum**. `tf.function` makes one graph of it all.


# %%
def train_step(strategy: tf.distribute.Strategy, model: tf.keras.Model, optimizer) -> Callable:
    """A function that makes one step with a global batch's pieces. It gives the sum of the losses of all images."""

    def replica_step(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
            loss = tf.reduce_sum(losses * weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return tf.reduce_sum(losses)

    @tf.function(reduce_retracing=True)
    def step(pieces: tuple) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(replica_step, args=pieces), axis=None)

    return step


def train_epoch(
    strategy: tf.distribute.Strategy, step: Callable, batches: tf.data.Dataset
) -> list[float]:
    """One epoch; the sum of the losses of each step's images."""
    return [
        float(step(pieces)) for pieces in strategy.experimental_distribute_dataset(batches)
    ]


# %% [markdown]
# **The trap in the loss**, prediction (1). The strategy adds up; it does not average. So an image must weigh one over the
# *global* batch. With one over its own piece, the learning rate is in effect doubled: faster here, and not what was asked for.

# %% tags=["active-ipynb"]
# def losses_of(own_mean):
#     """The mean loss of each step of the first epoch."""
#     batches = read_data(images, labels, 0, args)
#     if own_mean:  # a piece is half of the batch, so its images weigh twice as much
#         batches = batches.map(lambda images, labels, weights: (images, labels, 2 * weights))
#     step = train_step(strategy, *make(strategy, args, (1, 8, 8), 10))
#     return [total / size for total, size in zip(train_epoch(strategy, step, batches), [64] * 22 + [29])]
#
#
# right, wrong = losses_of(own_mean=False), losses_of(own_mean=True)
# alone = tf_common.serial(tf_common.cnn(), train, epochs=1, batch_size=64, lr=0.05, seed=0)
# apart = lambda losses: max(abs(a - b) for a, b in zip(losses, alone))
# print(f"1 / global batch: losses of one device to 1e-5: {apart(right) < 1e-5}; 1 / own piece: {apart(wrong):.1f} away")
# curves = {"one device, and 1 / global batch": right, "1 / own piece": wrong}
# title = "With each replica's own mean, the steps are twice as long"
# plots.lines(range(1, 24), curves, "step", "mean loss of the batch", title, level=None, powers=False)

# %% [markdown]
# **The trap in the scope.** The model is made inside, the optimizer outside: its momentum has one copy, which both replicas
# add to in turn. No error.

# %% tags=["active-ipynb"]
# model, _ = make(strategy, args, (1, 8, 8), 10)
# outside = tf.keras.optimizers.SGD(0.05, momentum=0.9)
# outside.build(model.trainable_variables)
# train_epoch(strategy, train_step(strategy, model, outside), read_data(images, labels, 0, args))
# first, second = (copy.numpy() for copy in strategy.experimental_local_results(model.trainable_variables[-2].value))
# print(f"after an epoch, the copies of a mirrored variable are {abs(first - second).max():.2f} apart")

# %% [markdown]
# ## Step 5 · Evaluate
# The same in small: each replica counts its hits. The test images are filled up so that no replica goes without; what
# fills up weighs nothing.


# %%
def test_step(strategy: tf.distribute.Strategy, model: tf.keras.Model) -> Callable:
    """A function that gives the number of hits in a batch's pieces. Made once: each new tf.function is traced anew."""

    def replica_step(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        right = tf.argmax(model(images), axis=1) == labels
        return tf.reduce_sum(tf.cast(right & (weights > 0), tf.float32))

    return tf.function(
        lambda pieces: strategy.reduce(
            "SUM", strategy.run(replica_step, args=pieces), axis=None
        )
    )


def hits(strategy: tf.distribute.Strategy, step: Callable, test: tf.data.Dataset) -> float:
    """How many of the test images are classified rightly."""
    return sum(
        float(step(pieces)) for pieces in strategy.experimental_distribute_dataset(test)
    )


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    launch.alone("TF_CNN_CustomLoop")
    places = tf_common.devices(args.devices, exact=args.prove)
    args.batch_size, _ = flags.split(args.batch_size, len(places), who="replica")
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    tf_common.refuse_pieces(len(train), args.batch_size, len(places))
    print(f"{tf_common.describe(places)}\n\n{metrics.header()}", flush=True)
    strategy = tf.distribute.MirroredStrategy(places)
    shape = tuple(train[0][0].shape), data.classes(train, test)
    model, optimizer = make(strategy, args, *shape)
    step, count, history = (
        train_step(strategy, model, optimizer),
        test_step(strategy, model),
        [],
    )
    images, labels, filled = (
        *tf_common.tensors(train),
        tf_common.filled(test, 256, len(places)),
    )
    for epoch in range(args.epochs):
        began = time.perf_counter()
        loss = sum(train_epoch(strategy, step, read_data(images, labels, epoch, args))) / len(
            train
        )
        speed = len(train) / (time.perf_counter() - began)
        metrics.finite(loss, epoch, launch.World())
        accuracy = hits(strategy, count, filled) / len(test)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": accuracy,
            "images_per_s": speed,
        }
        print(metrics.row(row), flush=True)
        history.append(row)
    with files.atomic(args.out / "model.keras") as temporary:
        model.save(temporary)
    what, fresh = (
        f"a loop by hand on {len(places)} replicas equals one device",
        tf_common.cnn(*shape, args.seed),
    )
    verdict = tf_common.against_serial(what, model, fresh, train, args) if args.prove else None
    told, device = (
        {"devices": len(places), "batch_size": args.batch_size},
        tf_common.torch_device(places),
    )
    metrics.report(args.out, launch.World(), device, history, verdict, **told)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% tags=["active-ipynb"]
# !python ../scripts/TF_CNN_CustomLoop.py --prove --out results/07-loop

# %% [markdown]
# ## PyTorch beside it
# Prediction (3). Lesson 01's model and loop in PyTorch, and TensorFlow on one device, for ten epochs:

# %% tags=["active-ipynb"]
# import torch
# from multigpu.models import CNN
# torch.manual_seed(0)
# model, theirs = CNN(), []
# optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# for epoch in range(10):
#     for batch in torch.as_tensor(tf_common.order(len(train), epoch, seed=0)).split(64):
#         optimizer.zero_grad()
#         loss = torch.nn.functional.cross_entropy(model(train[batch][0]), train[batch][1])
#         loss.backward()
#         optimizer.step()
#         theirs.append(loss.item())
# ours = tf_common.serial(tf_common.cnn(), train, epochs=10, batch_size=64, lr=0.05, seed=0)
# for step in range(3):
#     print(f"step {step + 1}: PyTorch {theirs[step]:.5f}, TensorFlow {ours[step]:.5f}")
# print(f"all {len(ours)} losses within 1e-5:", max(abs(a - b) for a, b in zip(ours, theirs)) < 1e-5)

# %% tags=["active-ipynb"]
# print(metrics.line("07 MirroredStrategy, by hand", "results/07-loop"))  # a line of the table of all routes
