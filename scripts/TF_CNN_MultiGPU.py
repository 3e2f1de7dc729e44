# %% [markdown]
# # 07 · TensorFlow: MirroredStrategy
# **The question.** I have two GPUs, and TensorFlow. Is `with strategy.scope():` enough? Does
# the model learn what it learns on one GPU?
#
# You need no GPU: without GPUs, TensorFlow divides the CPU into two
# [logical devices](../lessons/README.md#logical-device), which it uses like two GPUs. The CNN
# and the images are those of the PyTorch lessons. The first cell starts TensorFlow, which
# takes about ten seconds.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import time

import torch
from torch.utils.data import TensorDataset

from multigpu import data, files, flags, launch, metrics, tf_common
from multigpu.models import CNN
from multigpu.tf_common import tf  # TensorFlow, without the messages of its start


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "TF_CNN_MultiGPU",
        "Train a CNN with MirroredStrategy: one process, several GPUs.",
    )
    parser.add_argument(
        "--devices",
        type=flags.positive,
        help="replicas (default: all GPUs, or two logical devices of the CPU)",
    )
    parser.add_argument(
        "--amp",
        action="store_true",
        help="mixed precision: compute in 16 bit where that is safe",
    )
    return parser.parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# from multigpu import lesson
#
# lesson.setup("07-mirrored-strategy")
# from experiments import epoch_seconds, gradient_bars
#
# devices = tf_common.devices(2)  # two GPUs, or two logical devices of the CPU
# train, test = data.load(data.fetch(None))
# images, labels = tf_common.arrays(train)

# %% [markdown]
# ## MirroredStrategy in a few lines
# A [strategy](../lessons/README.md#strategy) is the object that decides on which devices
# TensorFlow trains a model. `MirroredStrategy` has one process, and a
# [replica](../lessons/README.md#replica) of the model on each device. A variable that is made
# in the strategy's [scope](../lessons/README.md#scope) is
# [mirrored](../lessons/README.md#mirrored-variable): each device has a copy. Here the whole
# model is one variable, `w`:

# %% tags=["active-ipynb"]
# strategy = tf.distribute.MirroredStrategy(devices)
# with strategy.scope():
#     w = tf.Variable(0.0)
#
# for copy in strategy.experimental_local_results(w):
#     print(copy.device[-5:], "has a copy, with the value", copy.numpy())

# %% [markdown]
# From a data set, the strategy makes a
# [distributed data set](../lessons/README.md#distributed-data-set): it divides each
# [global batch](../lessons/README.md#global-batch) into one
# [shard](../lessons/README.md#shard) for each replica. Here a batch is four numbers:

# %% tags=["active-ipynb"]
# def distributed(numbers):
#     """The numbers as one global batch, divided into shards."""
#     dataset = tf.data.Dataset.from_tensor_slices(numbers).batch(len(numbers))
#     (batch,) = strategy.experimental_distribute_dataset(dataset)
#     return batch
#
#
# print(distributed([1.0, 2.0, 3.0, 6.0]))

# %% [markdown]
# This is a [per-replica value](../lessons/README.md#per-replica-value): one tensor on each
# device.
#
# ## Predict first
# The loss of a number is `(w - number)²`. On one device the loss of the batch is the mean over
# its four numbers, so at w = 0 the gradient is −2 × the mean of the numbers: **−6**.
#
# With the strategy, each replica takes the mean over *its own* numbers. The strategy adds up
# the replicas' gradients. Write your answer, then run the cell:

# %% tags=["active-ipynb", "guess"]
# guess_own = -6  # the sum of the two replicas' gradients, for the numbers 1, 2, 3, 6

# %% [markdown]
# `strategy.run` calls a function once for each replica, on its device, with its shard.
# `strategy.reduce` adds up what the replicas return. `tf.function` compiles both into one
# graph.

# %% tags=["active-ipynb"]
# lesson.need(guess_own)
#
#
# def gradient_of_replica(shard):
#     with tf.GradientTape() as tape:
#         loss = tf.reduce_mean((w - shard) ** 2)  # as in a program for one GPU
#     return tape.gradient(loss, w)
#
#
# @tf.function
# def step(batch):
#     gradients = strategy.run(gradient_of_replica, args=(batch,))
#     return gradients, strategy.reduce("SUM", gradients, axis=None)
#
#
# gradients, total = step(distributed([1.0, 2.0, 3.0, 6.0]))
# print(gradients)
# lesson.compare("sum of the gradients", guess_own, total, digits=1)

# %% [markdown]
# The sum is twice the gradient of one device, as if the learning rate were doubled. No error
# reports it.
#
# Is it enough to divide by the number of replicas, as Keras's `fit` does? For this batch it
# is. Now take a batch of three numbers: 1 and 2 on replica 0, and 6 on replica 1. On one
# device its gradient is −6, too.

# %% tags=["active-ipynb", "guess"]
# guess_halved = -6  # 1, 2 and 6: the sum, if each replica's mean is divided by 2

# %% [markdown]
# Three rules for a replica's loss: the mean over its numbers; this mean, divided by the number
# of replicas; the *sum* over its numbers, divided by the size of the *global* batch.

# %% tags=["active-ipynb"]
# rules = {
#     "mean": lambda losses, size: tf.reduce_mean(losses),
#     "mean ÷ replicas": lambda losses, size: tf.reduce_mean(losses) / 2,
#     "sum ÷ global batch": lambda losses, size: tf.reduce_sum(losses) / size,
# }

# %% [markdown]
# The folded cell computes each replica's gradient with each rule, for both batches:

# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# lesson.need(guess_halved)
#
#
# def gradients_of_replica(shard, size):
#     gradients = {}
#     for name, rule in rules.items():
#         with tf.GradientTape() as tape:
#             loss = rule((w - shard) ** 2, size)
#         gradients[name] = tape.gradient(loss, w)
#     return gradients
#
#
# @tf.function
# def all_rules(batch, size):
#     return strategy.run(gradients_of_replica, args=(batch, size))
#
#
# found = {}
# for numbers in ([1.0, 2.0, 3.0, 6.0], [1.0, 2.0, 6.0]):
#     size = len(numbers)
#     found[size] = {
#         name: [float(copy) for copy in strategy.experimental_local_results(gradients)]
#         for name, gradients in all_rules(distributed(numbers), float(size)).items()
#     }
#
# sums = [f"{name} {sum(both):.1f}" for name, both in found[3].items()]
# print(f"1, 2, 6: one device {-2 * (1 + 2 + 6) / 3:.1f}; {', '.join(sums)}")
# halved = sum(found[3]["mean ÷ replicas"])
# lesson.compare("1, 2, 6, mean ÷ replicas", guess_halved, halved, digits=1)
# gradient_bars(found, right=-6)

# %% [markdown]
# Only the third rule is right for both batches. In the batch of three, the second rule counts
# replica 1's one number, the 6, as much as replica 0's two numbers together. The last batch of
# an epoch is often such an uneven one.
#
# The rest of the lesson trains a CNN with the third rule. Each image gets a *sample weight*,
# 1 / (images of the global batch), and a replica's loss is the sum of loss × sample weight.
# Without "sample", the word *weights* means the model's weights.
#
# ## Design the model
# The CNN of the other lessons in Keras, with the same first weights. In Keras the channels
# come last.


# %%
def cnn(
    shape: tuple[int, int, int] = (1, 8, 8), classes: int = 10, seed: int = 0
) -> tf.keras.Sequential:
    """The CNN, with the weights that PyTorch draws for `seed`."""
    channels, height, width = shape
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input((height, width, channels)),
            layers.Conv2D(16, kernel_size=3, padding="same", activation="tanh"),
            layers.ZeroPadding2D(1),
            layers.Conv2D(32, kernel_size=3, strides=2, activation="tanh"),
            layers.Flatten(),
            layers.Dense(64, activation="tanh"),
            layers.Dense(classes, dtype="float32"),  # not in 16 bit, also with --amp
        ]
    )
    torch.manual_seed(seed)
    # Transposes PyTorch's weights.
    model.set_weights(tf_common.keras_weights(CNN(shape, classes)))
    return model


# %% [markdown]
# Why `ZeroPadding2D`? With `padding="same"` at a stride of 2, Keras pads one side only, and
# PyTorch pads both. The same weights with either padding, compared with PyTorch:

# %% tags=["active-ipynb"]
# torch.manual_seed(0)
# with torch.no_grad():
#     expected = CNN()(train[:64][0]).numpy()
#
# first, _, second, *others = cnn().layers
# same = tf.keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="tanh")
# variant = tf.keras.Sequential([tf.keras.Input((8, 8, 1)), first, same, *others])
# same.set_weights(second.get_weights())
#
# away = abs(cnn()(images[:64]).numpy() - expected).max()
# print(f"ZeroPadding2D: outputs within 1e-6 of PyTorch's: {away < 1e-6}")
# away = abs(variant(images[:64]).numpy() - expected).max()
# print(f'padding="same": outputs up to {away:.2f} away, and no error')

# %% [markdown]
# ## Read in the data
# This `tf.data` pipeline puts the images in order, and makes **global** batches of them. Then
# `prefetch` reads the next batch while a step is computed. A batch has three parts: images,
# labels, and sample weights.


# %%
def read_data(
    train: TensorDataset,
    epochs: int,
    batch_size: int,
    seed: int,
) -> tf.data.Dataset:
    """All epochs in PyTorch's order: batches of (images, labels, sample weights)."""
    # Tensors in main memory: arrays would be copied into the graph.
    images, labels = tf_common.tensors(train)

    def gather(numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        sample_weight = 1 / tf.cast(tf.size(numbers), tf.float32)
        sample_weights = tf.fill(tf.shape(numbers), sample_weight)
        return tf.gather(images, numbers), tf.gather(labels, numbers), sample_weights

    def batches_of(order: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(order).batch(batch_size)

    orders = [tf_common.epoch_order(len(labels), epoch, seed) for epoch in range(epochs)]
    numbers = tf.data.Dataset.from_tensor_slices(orders).flat_map(batches_of)
    return numbers.map(gather, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


# %% [markdown]
# An epoch has 1,437 images: 22 global batches of 64, and a last one of 29. The shards of the
# first batch and of the last:

# %% tags=["active-ipynb"]
# epoch = list(strategy.experimental_distribute_dataset(read_data(train, 1, 64, seed=0)))
# for number in (0, 22):
#     shards = strategy.experimental_local_results(epoch[number][1])
#     print(f"batch {number}: images per replica {[len(shard) for shard in shards]}")

# %% [markdown]
# Here a global batch has 64 images for any number of replicas, so the result can be compared
# with one device's. Programs for real GPUs often take a batch per GPU ×
# `strategy.num_replicas_in_sync` instead, so that each GPU keeps its work. That is another
# run, often with a larger learning rate: [lesson 12](PT_CNN_Elastic.ipynb) tries both rates.
#
# ## Create a MirroredStrategy, and open its scope
# The strategy is the one above. The model and the optimizer are made in its scope, so their
# variables are mirrored, also the optimizer's state. A loss's
# [reduction](../lessons/README.md#reduction) says how the losses of a shard's images become
# one number, here their sum.


# %%
def make(
    strategy: tf.distribute.Strategy,
    args: argparse.Namespace,
    shape: tuple[int, int, int],
    classes: int,
) -> tf.keras.Model:
    """The compiled model, with a copy of each variable on each replica."""
    keras = tf.keras
    with strategy.scope():
        model = cnn(shape, classes, args.seed)
        optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)

        # The sum of loss × sample weight. Keras divides only a mean by the number of replicas.
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        mean_loss = keras.metrics.SparseCategoricalCrossentropy("mean_loss", from_logits=True)

        # The accuracy counts sample weights, so images that pad a batch do not count.
        model.compile(optimizer, loss, metrics=[mean_loss], weighted_metrics=["accuracy"])
    return model


# %% [markdown]
# One step of `fit`. The copies of the last layer's bias, before and after it:

# %% tags=["active-ipynb"]
# model = make(strategy, parse([]), (1, 8, 8), 10)
# batches = read_data(train, 1, 64, seed=0)
# bias = model.trainable_variables[-1].value
#
#
# def print_copies(when):
#     for copy in strategy.experimental_local_results(bias):
#         print(f"{when} the step, on {copy.device[-5:]}: {copy.numpy()[:3].round(4)}")
#
#
# print_copies("before")
# model.fit(batches, steps_per_epoch=1, shuffle=False, verbose=0)
# print_copies("after")

# %% [markdown]
# Each replica adds the other's gradients to its own, by an
# [all-reduce](../lessons/README.md#all-reduce), and makes the same update to its copy. So the
# copies stay equal, as with DDP.
#
# ![Two steps on two replicas](../lessons/07-mirrored-strategy/mirrored.png)
#
# **The scope forgotten.** Here the model is made outside the scope, and `fit` is called:

# %% tags=["active-ipynb", "guess"]
# guess_outside = "error"  # an "error", or fit trains on "one device", or on "both"?

# %% tags=["active-ipynb"]
# choices = ("error", "one device", "both")
# lesson.need(guess_outside, choices=choices)
# CrossEntropy = tf.keras.losses.SparseCategoricalCrossentropy
# forgotten = cnn()
# forgotten.compile("sgd", CrossEntropy(from_logits=True))
# print("the model's strategy:", type(forgotten.distribute_strategy).__name__)
# before = forgotten.get_weights()[-1]
# try:
#     forgotten.fit(images[:64], labels[:64], verbose=0)
#     changed = abs(forgotten.get_weights()[-1] - before).max() > 0
#     print("fit outside the scope: the weights have changed:", changed)
#     copies = strategy.experimental_local_results(forgotten.trainable_variables[-1].value)
#     outside = "both" if len(copies) == 2 else "one device"
# except Exception:
#     outside = "error"
# lesson.compare("fit, model made outside", guess_outside, outside, choices=choices)

# %% [markdown]
# It trains on one device, and the other one does nothing. `model.distribute_strategy`, printed
# first, is the model's strategy. And if the scope is open when `fit` is called?

# %% tags=["active-ipynb"]
# try:
#     with strategy.scope():
#         forgotten.fit(images[:64], labels[:64], verbose=0)
# except Exception as error:
#     print("fit inside the scope:", type(error).__name__, f"with the text {str(error)!r}")

# %% [markdown]
# Then Keras raises an error, and this error has no text.
#
# ## The loss of `fit`
# Keras's usual loss is the second of the three rules: the mean over the shard, divided by the
# number of replicas. It trains for one epoch of 23 batches, of which the last one is uneven.
# How far are the weights then from one device's? `--prove` allows 1e-5. The cell also trains
# with the sum of loss × sample weight.

# %% tags=["active-ipynb", "guess"]
# guess_usual = 0.01  # Keras's usual loss: the largest distance of a weight, a power of ten

# %% tags=["active-ipynb"]
# lesson.need(guess_usual)
# serial = cnn()
# tf_common.train_serially(serial, train, epochs=1, batch_size=64, lr=0.05, seed=0)
#
#
# def after_an_epoch(loss, batches):
#     """The largest difference from the serial run's weights, after one epoch of fit."""
#     with strategy.scope():
#         model = cnn()
#         model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.9), loss)
#     model.fit(batches, steps_per_epoch=23, shuffle=False, verbose=0)
#     return tf_common.difference(model, serial)
#
#
# unweighted = batches.map(lambda images, labels, sample_weights: (images, labels))
# usual = after_an_epoch(CrossEntropy(from_logits=True), unweighted)
# weighted = after_an_epoch(CrossEntropy(from_logits=True, reduction="sum"), batches)
# lesson.compare("Keras's mean, distance", guess_usual, usual, digits=4)
# print(f"sum of loss × sample weight: within 1e-6 of one device's: {weighted < 1e-6}")

# %% [markdown]
# One uneven batch of 23 makes this difference. Rounding alone makes less than 1e-6, as the
# second line shows. If all shards are even, Keras's usual loss is right, too
# (`tests/lessons/test_lesson07.py`): `batch(64, drop_remainder=True)` leaves out the last
# batch, with its 29 images.
#
# ## Train, evaluate, display the results
# `fit` trains, and evaluates after each epoch. The test images are padded so that every
# replica gets some; padding has sample weight 0. *Callbacks* display the results: the course's
# table here, and a log for TensorBoard.


# %%
class Table(tf.keras.callbacks.Callback):
    """Prints the course's table of epochs, a row after each epoch."""

    def __init__(self, images: int):
        super().__init__()
        self.images = images
        self.history = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.began = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        # Evaluation begins when the epoch's last training step is done.
        self.images_per_s = self.images / (time.perf_counter() - self.began)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        row = {
            "epoch": epoch + 1,
            "loss": metrics.check_loss(logs["mean_loss"], epoch, launch.World()),
            "test_accuracy": logs["val_accuracy"],
            "images_per_s": self.images_per_s,
        }
        print(metrics.row(row), flush=True)
        self.history.append(row)


# %% [markdown]
# ## All together
# Unlike lesson 05, this is one process, without ranks, and `fit` has the loop. So `main` makes
# the strategy and the model, calls `fit` once, and saves the model. (`--amp` is explained at
# the end.)


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    launch.single_process_world("TF_CNN_MultiGPU")
    devices = tf_common.devices(args.devices, exact=args.prove)
    replicas = len(devices)
    batch_size = flags.split_batch(args.batch_size, replicas, who="replica").global_size
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    tf_common.check_shards(len(train), batch_size, replicas, fit=True)
    print(f"{tf_common.describe(devices)}\n\n{metrics.header()}", flush=True)

    if args.amp:
        # Not float16, which needs a scaled loss.
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    strategy = tf.distribute.MirroredStrategy(devices)
    shape = tuple(train[0][0].shape)
    classes = data.num_classes(train, test)
    model = make(strategy, args, shape, classes)

    table = Table(len(train))
    log = args.out / "tensorboard" / time.strftime("%Y%m%d-%H%M%S")  # one folder per run
    model.fit(
        read_data(train, args.epochs, batch_size, args.seed),
        epochs=args.epochs,
        steps_per_epoch=-(-len(train) // batch_size),
        shuffle=False,  # read_data has shuffled
        validation_data=tf_common.padded_batches(test, 256, replicas),
        callbacks=[table, tf.keras.callbacks.TensorBoard(log)],
        verbose=0,
    )
    with files.atomic(args.out / "model.keras") as temporary:
        model.save(temporary)

    verdict = None
    if args.prove:
        verdict = tf_common.compare_with_serial(
            f"fit on {replicas} replicas equals one device",
            model,
            cnn(shape, classes, args.seed),
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
        table.history,
        verdict,
        devices=replicas,
        batch_size=batch_size,
    )


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# A new process, ten epochs, and the proof, in about 20 seconds. Images/s is the speed of this
# CPU, which both replicas share, so it does not show what a second GPU gains. In the
# [table of all routes](../lessons/routes.md) this script is slower than lesson 01's.

# %% tags=["active-ipynb"]
# !python ../scripts/TF_CNN_MultiGPU.py --prove --out results/07

# %% tags=["active-ipynb"]
# print(metrics.route_row("07 MirroredStrategy", "results/07"))  # for the table of all routes

# %% [markdown]
# **Is the scope enough?** Not alone:
# 1. Model and optimizer are made in the scope. `model.distribute_strategy` says whether the
#    model was.
# 2. The loss is the sum over the images, divided by the *global* batch.
# 3. BatchNorm gets `synchronized=True`: the next notebook shows why.
#
# **Does the model learn what it learns on one GPU?** This CNN does, except for rounding: the
# proof above says so. Compare your own model with one device, as `--prove` does.
#
# `fit` hides the loop. The next notebook writes it by hand.
#
# ## To go further
# The lesson's answer ends here. Three more questions: a saved model, `prefetch`, and 16 bit.
#
# **A model saved under the strategy**: does it need the strategy to load?

# %% tags=["active-ipynb"]
# loaded = tf.keras.models.load_model("results/07/model.keras")
# x_test, y_test = tf_common.arrays(test)
# accuracy = (loaded.predict(x_test, verbose=0).argmax(1) == y_test).mean()
# copies = strategy.experimental_local_results(loaded.trainable_variables[0].value)
# print(f"loaded: {len(copies)} copy of each variable, test accuracy {accuracy:.4f}")

# %% [markdown]
# It does not: it loads on one device, with the accuracy of the table.
#
# **Prefetch.** What does it gain, if reading a batch takes as long as a training step?

# %% tags=["active-ipynb", "guess"]
# # The time of an epoch if no `prefetch` is written, divided by the time with it:
# guess_prefetch = 2  # how many times as long?

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_prefetch)
#
#
# def read_slowly(number):
#     time.sleep(0.02)  # the disk
#     return number
#
#
# slow = tf.data.Dataset.range(12).map(lambda n: tf.py_function(read_slowly, [n], tf.int64))
# options = tf.data.Options()
# options.experimental_optimization.inject_prefetch = False
# datasets = {
#     "with prefetch": slow.prefetch(2),
#     "without": slow,
#     "without, and TensorFlow adds none": slow.with_options(options),
# }
# measured = {name: epoch_seconds(dataset, step=0.02) for name, dataset in datasets.items()}
# for name, (shortest, median, longest) in measured.items():
#     print(f"{name}: {median:.2f} s per epoch, {shortest:.2f} to {longest:.2f}")
# times = measured["without"][1] / measured["with prefetch"][1]
# lesson.compare("without ÷ with prefetch", guess_prefetch, times, unit="×", digits=1)

# %% [markdown]
# TensorFlow adds a prefetch to the end of a pipeline that has none. In the third row an option
# turns that off: only there, reading and the step do not overlap.
#
# **16 bit.** [Mixed precision](../lessons/README.md#mixed-precision) is set by a *policy* for
# all layers that are made afterwards. Variables stay in float32. With float16, `compile`
# wraps the optimizer, which then scales the [loss](../lessons/README.md#loss-scaling).

# %% tags=["active-ipynb"]
# for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
#     tf.keras.mixed_precision.set_global_policy(policy)
#     model = make(strategy, parse([]), (1, 8, 8), 10)
#     layer = model.layers[0]
#     types = f"computes in {layer.compute_dtype}, keeps {layer.kernel.dtype}"
#     print(f"{policy}: {types}, {type(model.optimizer).__name__}")
# tf.keras.mixed_precision.set_global_policy("float32")  # for all cells that run later

# %% [markdown]
# `--amp` takes bfloat16, whose range is that of float32: it needs no scaled loss. On several
# replicas, Keras's scaled loss is not safe: the page says why. Whether 16 bit saves time
# depends on the processor: see lesson 11.

# %% [markdown] tags=["footer"]
# [← 06 Model and data parallel](PT_CNN_HybridParallel.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/07-mirrored-strategy/README.md) ·
# [07 MirroredStrategy by hand →](TF_CNN_CustomLoop.ipynb)
