"""The longer experiments of lesson 08: `launch.call(on_worker, 2, experiment, …)`.

Each experiment gets the strategy and `world`, this worker's rank and the number of workers.
"""

import difflib
import os
import re
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from multigpu import data, launch, plots, tf_common, tf_config
from multigpu.tf_common import tf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Reads = tuple[dict[str, list[list[int]]], ...]  # what images_read returns, for each worker


# ---- 50 lines -------------------------------------------------------------------------------


def changed_lines(before: Path, after: Path) -> list[str]:
    """The lines that differ between two programs, with - (before) and + (after).

    Without docstrings, comments, blank lines and indentation.
    """

    def code(path: Path) -> list[str]:
        _, _, program = path.read_text().split('"""', 2)
        lines = (line.strip() for line in program.splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    changes = list(difflib.unified_diff(code(before), code(after), n=0, lineterm=""))[2:]
    return [line for line in changes if not line.startswith("@@")]


def largest_difference(path: Path | str, other: Path | str) -> float:
    """The largest difference between the weights in two files."""
    weights, others = np.load(path), np.load(other)
    return max(np.abs(weights[name] - others[name]).max() for name in weights.files)


# ---- two workers ----------------------------------------------------------------------------


def on_worker(*experiments: Callable) -> list:
    """Connect to the other workers and run the experiments, on CPUs. Returns their results."""
    world = tf_config.find_world()
    tf.config.set_visible_devices([], "GPU")
    addresses = tf_config.connect_workers(world, gpus=0)
    os.environ["TF_CONFIG"] = tf_config.write(addresses, world.rank)
    with tf_config.deadline():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return [experiment(strategy, world) for experiment in experiments]


# ---- who reads which image ------------------------------------------------------------------


def images_read(
    strategy: tf.distribute.Strategy,
    world: launch.World,
    images: int = 8,
    batch_size: int = 4,
) -> dict[str, list[list[int]]]:
    """The images that this worker reads in each step, with each policy of auto-sharding.

    They are in order; with "two seeds", each worker shuffles them with a seed of its own. With
    FILE, and "files", they are in two files: the first half and the second half.
    """
    in_order = tf.data.Dataset.from_tensor_slices(range(images))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("0.txt", "1.txt")]
        halves = range(images // 2), range(images // 2, images)
        for path, half in zip(paths, halves, strict=True):
            path.write_text("\n".join(map(str, half)))
        lines = tf.data.TextLineDataset([str(path) for path in paths])
        in_files = lines.map(lambda line: tf.strings.to_number(line, tf.int32))
        datasets = {
            "AUTO": in_order,
            "AUTO, files": in_files,
            "AUTO, two seeds": in_order.shuffle(images, seed=world.rank),
            "DATA": in_order,
            "FILE": in_files,
            "OFF": in_order,
        }
        read = {}
        for name, numbers in datasets.items():
            policy = tf.data.experimental.AutoShardPolicy[name.partition(",")[0]]
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = policy
            batches = numbers.batch(batch_size).with_options(options)
            read[name] = [
                strategy.experimental_local_results(batch)[0].numpy().tolist()
                for batch in strategy.experimental_distribute_dataset(batches)
            ]
    return read


def print_reads(read: Reads, policies: list[str]) -> None:
    """Print which images each of two workers reads in each step, a line for each policy."""
    for policy in policies:
        first, second = (worker_reads[policy] for worker_reads in read)
        print(f"{policy}: worker 0 reads {first}, worker 1 {second}")


def draw_reads(read: Reads, title: str) -> "Figure":
    """Draw which of two workers reads which image, and in which step."""
    rows = {
        name: [[*chain(*worker_reads[name])] for worker_reads in read]
        for name in ("AUTO", "FILE")
    }
    for name in ("OFF", "AUTO, two seeds"):
        first, second = ([*chain(*worker_reads[name])] for worker_reads in read)
        rows[f"{name}, worker 0"], rows[f"{name}, worker 1"] = [first, []], [[], second]
    fig = plots.shards(list(rows.values()), title, list(rows), images_per_step=2)
    fig.axes[0].set_xlabel("image (large: the worker that reads it; small: in which step)")
    return fig


# ---- do the workers begin with the same weights? --------------------------------------------


def first_weights(
    strategy: tf.distribute.Strategy, world: launch.World
) -> dict[str, np.ndarray]:
    """This worker's first weights in two models. Each worker has a seed of its own.

    The layers of one model draw their weights. The other's weights are drawn by NumPy, and
    `set_weights` assigns them.
    """
    random = np.random.default_rng(world.rank)
    with strategy.scope():
        tf.keras.utils.set_random_seed(world.rank)
        models = {name: _dense() for name in ("drawn", "assigned")}
        shapes = [weights.shape for weights in models["assigned"].get_weights()]
        models["assigned"].set_weights([random.normal(size=shape) for shape in shapes])
    return {name: _vector(model) for name, model in models.items()}


def try_fit(strategy: tf.distribute.Strategy, world: launch.World) -> str:
    """The error that Keras's `fit` raises, without its numbers; "" if it trains."""
    with strategy.scope():
        model = _dense()
        model.compile("sgd", "mse")
    try:
        model.fit(np.zeros((8, 64)), np.zeros((8, 10)), batch_size=4, verbose=0)
    except ValueError as error:
        return re.sub(r"{.*}", "{…}", str(error), flags=re.DOTALL)
    return ""


def _dense() -> tf.keras.Model:
    return tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10)])


def _vector(model: tf.keras.Model) -> np.ndarray:
    """The trainable weights as one vector."""
    return np.concatenate([np.ravel(weights) for weights in model.trainable_variables])


# ---- BatchNorm ------------------------------------------------------------------------------


def batch_norm(
    strategy: tf.distribute.Strategy,
    world: launch.World,
    kinds: tuple[bool, ...] = (False, True),
    seeds: tuple[int, ...] = (0, 1, 2),
    steps: int = 60,
) -> list[dict]:
    """Train a net with BatchNorm, not synchronized and synchronized, 64 images in each step.

    Half of the images show the digits 0 to 4, half 5 to 9; of two workers, each reads a half.
    Returns for each kind this worker's trainable weights, as one vector, and its moving mean,
    the mean of each pixel, both with the first seed; and the test accuracies of its copy of
    the model, one for each seed of the first weights.
    """
    train, test = [
        (images.reshape(-1, 64), labels)
        for images, labels in map(tf_common.arrays, data.load(data.fetch(None)))
    ]
    halves = [np.flatnonzero(train[1] < 5), np.flatnonzero(train[1] >= 5)]
    own_halves = halves[world.rank :: world.size]

    def trained(synchronized: bool, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
        tf.keras.utils.set_random_seed(seed)
        layers = tf.keras.layers
        with strategy.scope():
            norm = layers.BatchNormalization(momentum=0.9, synchronized=synchronized)
            dense = [layers.Dense(32, activation="tanh"), layers.Dense(10)]
            model = tf.keras.Sequential([tf.keras.Input((64,)), norm, *dense])
            optimizer = tf.keras.optimizers.SGD(0.3)
            optimizer.build(model.trainable_variables)
        step = _step(model, optimizer)
        for number in range(steps):
            place = np.arange(32 * number, 32 * number + 32)
            rows = np.concatenate([np.take(half, place, mode="wrap") for half in own_halves])
            strategy.run(step, args=(tf.constant(train[0][rows]), tf.constant(train[1][rows])))
        predictions = np.argmax(model(test[0], training=False), axis=1)
        accuracy = np.mean(predictions == test[1])
        return _vector(model), norm.moving_mean.numpy(), accuracy

    results = []
    for synchronized in kinds:
        runs = [trained(synchronized, seed) for seed in seeds]
        weights, moving_mean, _ = runs[0]
        accuracies = [accuracy for *_, accuracy in runs]
        results.append(
            {"weights": weights, "moving mean": moving_mean, "accuracies": accuracies}
        )
    return results


def batch_norm_alone() -> dict:
    """`batch_norm` on one device, where synchronized statistics are the same as the others."""
    (result,) = batch_norm(tf.distribute.get_strategy(), launch.World(), kinds=(False,))
    return result


def draw_moving_means(results: dict[str, dict]) -> "Figure":
    """Draw the moving mean of each result of `batch_norm` as an image, by name."""
    fig = plots.figure(8, 3)
    for place, (name, result) in enumerate(results.items()):
        axes = fig.add_subplot(1, len(results), place + 1)
        axes.imshow(result["moving mean"].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[], xlabel=name)
        axes.spines[:].set_visible(False)
    fig.suptitle("The moving mean of a worker's own digits, or of all digits if synchronized")
    return fig


def _step(model: tf.keras.Model, optimizer: tf.keras.Optimizer) -> Callable:
    """A function for `strategy.run`: one training step of a global batch of 64 images."""

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(losses) / 64
        optimizer.apply(tape.gradient(loss, model.trainable_variables))

    return step


# ---- Slurm ----------------------------------------------------------------------------------


def slurm_addresses(nodes: str) -> list[str]:
    """The list of SlurmClusterResolver, for one task on each of two nodes, by rank.

    `nodes` is in Slurm's form: "n[2,10]".
    """
    step = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    before = dict(os.environ)
    os.environ.update(step)
    try:
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver
        cluster = resolver(gpus_per_node=2, auto_set_gpu=False).cluster_spec()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return cluster.as_dict()["worker"]
