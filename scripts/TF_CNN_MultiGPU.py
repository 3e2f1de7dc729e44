# %% [markdown]
# # 07 · TensorFlow: MirroredStrategy
# **The question.** I have two GPUs, and TensorFlow. Is `with strategy.scope():` enough? Does it learn what PyTorch learns?
#
# **Predict first.** (1) A global batch of 64: what does each replica get, and what of a last batch of 29? (2) Keras
# takes the mean loss over each replica's piece. Does that train as one GPU would? (3) The model is made outside the scope:
# an error, or a run on one device? (Without GPUs, two parts of the CPU hold a replica each.)

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
        "TF_CNN_MultiGPU", "Train a CNN with MirroredStrategy: one process, several GPUs."
    )
    parser.add_argument(
        "--devices",
        type=flags.positive,
        help="replicas (default: all GPUs, or two parts of the CPU)",
    )
    parser.add_argument(
        "--amp", action="store_true", help="compute in 16 bit where that is safe"
    )
    return parser.parse_args(arguments)


# %% tags=["active-ipynb"]
# places = tf_common.devices(2)  # two GPUs, or two parts of the CPU: before TensorFlow's first operation, or never
# strategy = tf.distribute.MirroredStrategy(places)
# print(strategy.num_replicas_in_sync, "replicas")

# %% [markdown]
# ## Step 1 · Design the model
# `tf_common.cnn` is the CNN of the other lessons in Keras, with the same first weights. Two things differ silently: the
# channels come last, and `padding="same"` is not PyTorch's padding at a stride of 2.

# %% tags=["active-ipynb"]
# from multigpu.models import CNN
# train, test = data.load(data.fetch(None))
# images, labels = tf_common.arrays(train)
# print(f"{tf_common.cnn().count_params():,} parameters, in PyTorch {sum(p.numel() for p in CNN().parameters()):,}")
# print(f"images {images.shape[1:]}, in PyTorch {tuple(train[0][0].shape)}")

# %% [markdown]
# ## Step 2 · Read in the data
# `tf.data` is a chain: the order of the epochs, cut into **global** batches, each read ahead of its step by
# `prefetch`. The third thing in a batch is each image's **weight**, one over the images of the whole batch: see step 4.


# %%
def read_data(
    train: TensorDataset, epochs: int, batch_size: int, seed: int
) -> tf.data.Dataset:
    """All epochs, one after the other, in PyTorch's order: batches of (images, labels, weights)."""
    images, labels = tf_common.tensors(
        train
    )  # in main memory: arrays would be copied into the graph

    def batch(numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        weights = tf.fill(tf.shape(numbers), 1 / tf.cast(tf.size(numbers), tf.float32))
        return tf.gather(images, numbers), tf.gather(labels, numbers), weights

    orders = [tf_common.order(len(labels), epoch, seed) for epoch in range(epochs)]
    numbers = tf.data.Dataset.from_tensor_slices(orders).flat_map(
        lambda order: tf.data.Dataset.from_tensor_slices(order).batch(batch_size)
    )
    return numbers.map(batch, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


# %% [markdown]
# The strategy splits a global batch: each replica takes a run of it. `shard` deals images out like cards, for workers
# that read for themselves (lesson 08). What is `prefetch` worth, where reading takes as long as a step? Half of the time;
# but TensorFlow puts one in by itself, unless it is told not to.

# %% tags=["active-ipynb"]
# from multigpu import plots
# epoch = list(strategy.experimental_distribute_dataset(read_data(train, 1, 64, seed=0)))
# for number in (0, 22):  # prediction (1)
#     print("batch", number, [len(piece) for piece in strategy.experimental_local_results(epoch[number][1])])
# numbers = tf.data.Dataset.range(24)
# batches = [strategy.experimental_local_results(batch) for batch in strategy.experimental_distribute_dataset(numbers.batch(8))]
# split = [[int(number) for batch in batches for number in batch[index]] for index in (0, 1)]
# cards = [[int(number) for number in numbers.shard(2, index)] for index in (0, 1)]
# plots.shares([split, cards], "The strategy cuts each batch of 8; shard deals out cards", ["split", "shard"], piece=4)

# %% tags=["active-ipynb"]
# from timeit import repeat
# def seconds(dataset):
#     return min(repeat(lambda: [time.sleep(0.02) for _ in dataset], number=1, repeat=3))  # sleeps for the step
#
#
# slowly = lambda number: time.sleep(0.02) or number  # the disk
# slow = tf.data.Dataset.range(20).map(lambda number: tf.py_function(slowly, [number], tf.int64))
# told = tf.data.Options()
# told.experimental_optimization.inject_prefetch = False
# with_it, without, unsaid = seconds(slow.prefetch(2)), seconds(slow.with_options(told)), seconds(slow)
# print(f"as long as with prefetch: not allowed {without / with_it:.0f} times, not written {unsaid / with_it:.0f} times")

# %% [markdown]
# ## Step 3 · Create a MirroredStrategy · Step 4 · Open its scope
# Variables that are made in the scope are **mirrored**: one copy on each device, kept equal. The optimizer's state, too.


# %%
def make(
    strategy: tf.distribute.Strategy, args: argparse.Namespace, shape: tuple, classes: int
) -> tf.keras.Model:
    with strategy.scope():
        model = tf_common.cnn(shape, classes, args.seed)
        model.compile(
            tf.keras.optimizers.SGD(args.lr, momentum=0.9),
            tf.keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="sum"
            ),  # of loss × weight
            metrics=[
                tf.keras.metrics.SparseCategoricalCrossentropy(
                    from_logits=True, name="mean_loss"
                )
            ],  # over images
            weighted_metrics=["accuracy"],  # so what fills up counts nothing
        )
    return model


# %% tags=["active-ipynb"]
# model, batches = make(strategy, parse([]), (1, 8, 8), 10), read_data(train, 1, 64, seed=0)
# bias = model.trainable_variables[-1].value
# for when in ("before", "after"):
#     for copy in strategy.experimental_local_results(bias):
#         print(f"{when} the step, on {copy.device[-5:]}: {copy.numpy()[:3].round(4)}")
#     model.fit(batches, steps_per_epoch=1, shuffle=False, verbose=0)

# %% [markdown]
# **The scope forgotten**, prediction (3). Keras 3 has no words for it; and where nothing contradicts, it says nothing.

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
# **The trap in the loss**, prediction (2). Gradients are **added up** over the replicas. Keras's usual loss, the mean over
# a piece, is therefore divided by the number of replicas: right, as long as all pieces are of one size. In our last batch
# of 29 they are not. Weights of one over the global batch, and a sum, are right for every batch.

# %% tags=["active-ipynb"]
# def after_an_epoch(loss, weighted):
#     """How far from the serial run the weights are, after one epoch of fit."""
#     with strategy.scope():
#         model = tf_common.cnn()
#         model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.9), loss)
#     of = batches if weighted else batches.map(lambda *batch: batch[:2])
#     model.fit(of, steps_per_epoch=23, shuffle=False, verbose=0)
#     return tf_common.difference(model, serial)
#
#
# serial = tf_common.cnn()
# tf_common.serial(serial, train, epochs=1, batch_size=64, lr=0.05, seed=0)
# loss = tf.keras.losses.SparseCategoricalCrossentropy
# print(f"sum of loss × weight: 1e-6 from the serial run: {after_an_epoch(loss(True, reduction='sum'), True) < 1e-6}")
# print(f"Keras's mean: {after_an_epoch(loss(True), False):.4f} from it")

# %% [markdown]
# **Mixed precision** is a policy for layers that are made from now on. Variables stay in 32 bit; float16 has the loss scaled.

# %% tags=["active-ipynb"]
# for policy in ("mixed_bfloat16", "mixed_float16", "float32"):
#     tf.keras.mixed_precision.set_global_policy(policy)
#     layer = (model := make(strategy, parse([]), (1, 8, 8), 10)).layers[0]
#     print(f"{policy}: computes in {layer.compute_dtype}, keeps {layer.kernel.dtype}, {type(model.optimizer).__name__}")

# %% [markdown]
# ## Step 5 · Train · Step 6 · Evaluate · Step 7 · Display the results
# `fit` trains, and evaluates after each epoch. The test images are filled up so that no replica goes without; what fills
# up weighs nothing. Callbacks display: the course's table here, TensorBoard's log beside it.


# %%
class Table(tf.keras.callbacks.Callback):
    """The course's table of epochs, a row after each."""

    def __init__(self, images: int):
        super().__init__()
        self.images, self.history = images, []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.began = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:  # the epoch's training is done
        self.speed = self.images / (time.perf_counter() - self.began)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        loss = metrics.finite(logs["mean_loss"], epoch, launch.World())
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": logs["val_accuracy"],
            "images_per_s": self.speed,
        }
        print(metrics.row(row), flush=True)
        self.history.append(row)


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    launch.alone("TF_CNN_MultiGPU")
    places = tf_common.devices(args.devices, exact=args.prove)
    args.batch_size, _ = flags.split(args.batch_size, len(places), who="replica")
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    tf_common.refuse_pieces(len(train), args.batch_size, len(places), fit=True)
    print(f"{tf_common.describe(places)}\n\n{metrics.header()}", flush=True)
    if args.amp:
        tf.keras.mixed_precision.set_global_policy(
            "mixed_bfloat16"
        )  # not float16: see the lesson's page
    strategy = tf.distribute.MirroredStrategy(places)
    shape = tuple(train[0][0].shape), data.classes(train, test)
    model = make(strategy, args, *shape)
    board = tf.keras.callbacks.TensorBoard(
        args.out / "tensorboard" / time.strftime("%Y%m%d-%H%M%S")
    )  # one folder a run
    batches, filled = (
        read_data(train, args.epochs, args.batch_size, args.seed),
        tf_common.filled(test, 256, len(places)),
    )
    how = {
        "steps_per_epoch": -(-len(train) // args.batch_size),
        "shuffle": False,
        "verbose": 0,
    }  # tf.data has shuffled
    model.fit(
        batches,
        epochs=args.epochs,
        validation_data=filled,
        callbacks=[table := Table(len(train)), board],
        **how,
    )
    with files.atomic(args.out / "model.keras") as temporary:
        model.save(temporary)
    what, fresh = (
        f"MirroredStrategy with {len(places)} replicas equals one device",
        tf_common.cnn(*shape, args.seed),
    )
    verdict = tf_common.against_serial(what, model, fresh, train, args) if args.prove else None
    told, device = (
        {"devices": len(places), "batch_size": args.batch_size},
        tf_common.torch_device(places),
    )
    metrics.report(args.out, launch.World(), device, table.history, verdict, **told)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% tags=["active-ipynb"]
# !python ../scripts/TF_CNN_MultiGPU.py --prove --out results/07

# %% [markdown]
# **Saved under the strategy, loaded without it:** a plain model on one device. And what TensorBoard shows, read from its log:

# %% tags=["active-ipynb"]
# from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
# loaded = tf.keras.models.load_model("results/07/model.keras")
# x_test, y_test = tf_common.arrays(test)
# right = (loaded.predict(x_test, verbose=0).argmax(1) == y_test).mean()
# print(f"{type(loaded.trainable_variables[0].value).__name__}, test accuracy {right:.4f}")
# log = EventAccumulator(max(tf.io.gfile.glob("results/07/tensorboard/*/validation"))).Reload()  # the last run's
# print([round(float(tf.make_ndarray(event.tensor_proto)), 2) for event in log.Tensors("epoch_accuracy")])

# %% tags=["active-ipynb"]
# print(metrics.line("07 MirroredStrategy", "results/07"))  # every lesson ends with such a line, so that routes can be compared
