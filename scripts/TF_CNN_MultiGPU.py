# %% [markdown]
# # 07 · TensorFlow: MirroredStrategy
# **The question.** I have two GPUs, and TensorFlow. Is `with strategy.scope():` enough? Does
# the model learn what it learns in PyTorch?
#
# **Predict first.** (1) A global batch has 64 images: how many does each replica get, and how
# many of a last batch of 29? (2) Keras takes the mean loss over each replica's shard. Does
# that train as one GPU would? (3) The model is made outside the scope: is that an error, or
# does it run on one device? (Without GPUs, two parts of the CPU hold a replica each.)

# %%
import argparse
import time

from torch.utils.data import TensorDataset

from multigpu import data, files, flags, launch, metrics, tf_common
from multigpu.tf_common import tf  # TensorFlow, without the messages of its start

# %% [markdown]
# ## Step 0 · The flags


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "TF_CNN_MultiGPU",
        "Train a CNN with MirroredStrategy: one process, several GPUs.",
    )
    parser.add_argument(
        "--devices",
        type=flags.positive,
        help="replicas (default: all GPUs, or two parts of the CPU)",
    )
    parser.add_argument(
        "--amp",
        action="store_true",
        help="mixed precision: compute in 16 bit where that is safe",
    )
    return parser.parse_args(arguments)


# %% tags=["active-ipynb"]
# # Two GPUs, or two parts of the CPU. Only possible before TensorFlow's first operation.
# devices = tf_common.devices(2)
# strategy = tf.distribute.MirroredStrategy(devices)
# print(strategy.num_replicas_in_sync, "replicas")

# %% [markdown]
# ## Step 1 · Design the model
# `tf_common.cnn` is the CNN of the other lessons in Keras, with the same first weights. Two
# things differ, and no error reports them: the channels come last, and `padding="same"` is not
# PyTorch's padding at a stride of 2.

# %% tags=["active-ipynb"]
# from multigpu.models import CNN
#
# train, test = data.load(data.fetch(None))
# images, labels = tf_common.arrays(train)
# in_torch = sum(parameter.numel() for parameter in CNN().parameters())
# print(f"{tf_common.cnn().count_params():,} parameters, in PyTorch {in_torch:,}")
# print(f"images {images.shape[1:]}, in PyTorch {tuple(train[0][0].shape)}")

# %% [markdown]
# ## Step 2 · Read in the data
# A `tf.data` pipeline has steps: the order of the images, then **global** batches, then
# `prefetch`, which reads a batch while the step before it is computed. The third part of a
# batch is each image's **weight**, one over the images of the whole batch: step 4 explains it.


# %%
def read_data(
    train: TensorDataset,
    epochs: int,
    batch_size: int,
    seed: int,
) -> tf.data.Dataset:
    """All epochs in PyTorch's order: batches of (images, labels, weights)."""
    # Tensors in main memory: arrays would be copied into the graph.
    images, labels = tf_common.tensors(train)

    def gather(numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        weight = 1 / tf.cast(tf.size(numbers), tf.float32)
        weights = tf.fill(tf.shape(numbers), weight)
        return tf.gather(images, numbers), tf.gather(labels, numbers), weights

    def batches_of(order: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(order).batch(batch_size)

    orders = [tf_common.epoch_order(len(labels), epoch, seed) for epoch in range(epochs)]
    numbers = tf.data.Dataset.from_tensor_slices(orders).flat_map(batches_of)
    return numbers.map(gather, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


# %% [markdown]
# The strategy splits a global batch: each replica gets a contiguous shard of it.
# `Dataset.shard` gives out single images in turn, for workers that read for themselves (lesson
# 08).

# %% tags=["active-ipynb"]
# from multigpu import plots
#
# def shards_of(batch):
#     """The shard of each replica."""
#     return strategy.experimental_local_results(batch)
#
# epoch = list(strategy.experimental_distribute_dataset(read_data(train, 1, 64, seed=0)))
# for number in (0, 22):  # prediction (1)
#     print("batch", number, [len(shard) for shard in shards_of(epoch[number][1])])
#
# numbers = tf.data.Dataset.range(24)
# by_strategy = [[], []]
# for batch in strategy.experimental_distribute_dataset(numbers.batch(8)):
#     for replica, shard in enumerate(shards_of(batch)):
#         by_strategy[replica] += shard.numpy().tolist()
# by_shard = [[int(number) for number in numbers.shard(2, index)] for index in (0, 1)]
#
# title = "The strategy splits each batch of 8; shard gives out images in turn"
# plots.shards([by_strategy, by_shard], title, ["strategy", "shard"], 4)

# %% [markdown]
# What does `prefetch` gain, if reading takes as long as a step? Half of the time. But
# TensorFlow adds one by itself, unless an option forbids it.

# %% tags=["active-ipynb"]
# from timeit import repeat
#
# def read_slowly(number):
#     time.sleep(0.02)  # the disk
#     return number
#
# def seconds(dataset):
#     def epoch():
#         for _ in dataset:
#             time.sleep(0.02)  # the training step
#     return min(repeat(epoch, number=1, repeat=3))
#
# slow = tf.data.Dataset.range(20).map(lambda n: tf.py_function(read_slowly, [n], tf.int64))
# options = tf.data.Options()
# options.experimental_optimization.inject_prefetch = False
#
# with_prefetch = seconds(slow.prefetch(2))
# forbidden = seconds(slow.with_options(options)) / with_prefetch
# by_default = seconds(slow) / with_prefetch
# ratios = f"forbidden {forbidden:.0f} times, default {by_default:.0f} times"
# print("as long as with prefetch:", ratios)

# %% [markdown]
# ## Step 3 · Create a MirroredStrategy · Step 4 · Open its scope
# Variables made in the scope are **mirrored**: each device has a copy, and the copies stay
# equal. That includes the optimizer's state.


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
        model = tf_common.cnn(shape, classes, args.seed)
        optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)

        # The sum of loss × weight: the trap in the loss, below, shows why.
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        mean_loss = keras.metrics.SparseCategoricalCrossentropy("mean_loss", from_logits=True)

        # The accuracy takes the weights into account, so images that pad a batch do not count.
        model.compile(optimizer, loss, metrics=[mean_loss], weighted_metrics=["accuracy"])
    return model


# %% tags=["active-ipynb"]
# model = make(strategy, parse([]), (1, 8, 8), 10)
# batches = read_data(train, 1, 64, seed=0)
# bias = model.trainable_variables[-1].value
#
# def print_copies(when):
#     for copy in strategy.experimental_local_results(bias):
#         print(f"{when} the step, on {copy.device[-5:]}: {copy.numpy()[:3].round(4)}")
#
# print_copies("before")
# model.fit(batches, steps_per_epoch=1, shuffle=False, verbose=0)
# print_copies("after")

# %% [markdown]
# **The scope forgotten**, prediction (3). Keras 3 raises an error without a text, and only if
# the scope is open when `fit` is called.

# %% tags=["active-ipynb"]
# forgotten = tf_common.cnn()
# forgotten.compile("sgd", "sparse_categorical_crossentropy")
# print("fit outside:", type(forgotten.distribute_strategy).__name__)
# try:
#     with strategy.scope():
#         forgotten.fit(images[:64], labels[:64], verbose=0)
# except Exception as error:
#     print("fit inside:", type(error).__name__, f"with the text {str(error)!r}")

# %% [markdown]
# **The trap in the loss**, prediction (2). The strategy **adds up** the replicas' gradients.
# Keras therefore divides its usual loss, the mean over a shard, by the number of replicas.
# That is right if all shards have one size. In our last batch of 29 they do not. Weights of
# one over the global batch, and a sum, are right for every batch.

# %% tags=["active-ipynb"]
# def after_an_epoch(loss, batches):
#     """The largest difference from the serial run's weights, after one epoch of fit."""
#     with strategy.scope():
#         model = tf_common.cnn()
#         model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.9), loss)
#     model.fit(batches, steps_per_epoch=23, shuffle=False, verbose=0)
#     return tf_common.difference(model, serial)
#
# serial = tf_common.cnn()
# tf_common.train_serially(serial, train, epochs=1, batch_size=64, lr=0.05, seed=0)
#
# Loss = tf.keras.losses.SparseCategoricalCrossentropy
# weighted_sum = after_an_epoch(Loss(from_logits=True, reduction="sum"), batches)
# print(f"sum of loss × weight: 1e-6 from the serial run: {weighted_sum < 1e-6}")
#
# unweighted = batches.map(lambda images, labels, weights: (images, labels))
# print(f"Keras's mean: {after_an_epoch(Loss(from_logits=True), unweighted):.4f} from it")

# %% [markdown]
# **Mixed precision** is a policy for the layers that are made after it is set. Variables stay
# in fp32. With float16 the loss is scaled.

# %% tags=["active-ipynb"]
# for policy in ("mixed_bfloat16", "mixed_float16", "float32"):
#     tf.keras.mixed_precision.set_global_policy(policy)
#     model = make(strategy, parse([]), (1, 8, 8), 10)
#     layer = model.layers[0]
#     types = f"computes in {layer.compute_dtype}, keeps {layer.kernel.dtype}"
#     print(f"{policy}: {types}, {type(model.optimizer).__name__}")

# %% [markdown]
# ## Step 5 · Train · Step 6 · Evaluate · Step 7 · Display the results
# `fit` trains, and evaluates after each epoch. The test images are padded so that every
# replica gets some; padding has weight 0. Callbacks display the results: the course's table
# here, and a log for TensorBoard.


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


# %%
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
        # The lesson's page explains why this is not float16.
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    strategy = tf.distribute.MirroredStrategy(devices)
    shape = tuple(train[0][0].shape)
    classes = data.num_classes(train, test)
    model = make(strategy, args, shape, classes)

    table = Table(len(train))
    log = args.out / "tensorboard" / time.strftime("%Y%m%d-%H%M%S")  # one folder a run
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
        table.history,
        verdict,
        devices=replicas,
        batch_size=batch_size,
    )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% tags=["active-ipynb"]
# !python ../scripts/TF_CNN_MultiGPU.py --prove --out results/07

# %% [markdown]
# **A model saved under the strategy loads without it**, as a plain model on one device. And
# here is what TensorBoard shows, read from its log:

# %% tags=["active-ipynb"]
# from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
#
# loaded = tf.keras.models.load_model("results/07/model.keras")
# x_test, y_test = tf_common.arrays(test)
# accuracy = (loaded.predict(x_test, verbose=0).argmax(1) == y_test).mean()
# variable = loaded.trainable_variables[0].value
# print(f"{type(variable).__name__}, test accuracy {accuracy:.4f}")
#
# last_run = max(tf.io.gfile.glob("results/07/tensorboard/*/validation"))
# events = EventAccumulator(last_run).Reload().Tensors("epoch_accuracy")
# print([round(float(tf.make_ndarray(event.tensor_proto)), 2) for event in events])

# %% tags=["active-ipynb"]
# print(metrics.route_row("07 MirroredStrategy", "results/07"))  # for the table of routes

# %% [markdown] tags=["footer"]
# [← 06 Model and data parallel](PT_CNN_HybridParallel.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/07-mirrored-strategy/README.md) ·
# [07 MirroredStrategy by hand →](TF_CNN_CustomLoop.ipynb)
