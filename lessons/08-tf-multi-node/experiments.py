"""The longer experiments of lesson 08: `launch.call(on_worker, 2, experiment, …)`.

Each experiment gets the strategy and `world`, this worker's rank and the number of workers.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from multigpu import data, launch, tf_common, tf_config
from multigpu.tf_common import tf


def on_worker(*experiments: Callable) -> list:
    """Connect to the other workers and run the experiments, on CPUs. Returns their results.

    In a process that no launcher has started, the strategy is that of one device.
    """
    world = tf_config.find_world()
    if world.size == 1:
        strategy = tf.distribute.get_strategy()
    else:
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


def steps_made(
    strategy: tf.distribute.Strategy, world: launch.World, images: tuple[int, ...] = (100, 44)
) -> list[int]:
    """This worker's images in each step, if worker w has images[w], in batches of 10."""

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.range(images[context.input_pipeline_id]).batch(10)

    batches = strategy.distribute_datasets_from_function(of_worker)
    return [len(strategy.experimental_local_results(batch)[0]) for batch in batches]


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
    """Train with BatchNorm, not synchronized and synchronized, on 64 images in each step.

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
    own = halves[world.rank :: world.size]

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
            rows = np.concatenate([np.take(half, place, mode="wrap") for half in own])
            strategy.run(step, args=(tf.constant(train[0][rows]), tf.constant(train[1][rows])))
        predictions = np.argmax(model(test[0], training=False), axis=1)
        accuracy = np.mean(predictions == test[1])
        return _vector(model), norm.moving_mean.numpy(), accuracy

    found = []
    for synchronized in kinds:
        runs = [trained(synchronized, seed) for seed in seeds]
        weights, moving_mean, _ = runs[0]
        accuracies = [accuracy for *_, accuracy in runs]
        found.append(
            {"weights": weights, "moving mean": moving_mean, "accuracies": accuracies}
        )
    return found


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


# ---- what the all-reduce costs --------------------------------------------------------------


def all_reduce_seconds(
    strategy: tf.distribute.Strategy,
    world: launch.World,
    sizes: tuple[int, ...] = (1, 38_282, 2_500_000),
    warm_up: int = 10,
    repeats: int = 20,
) -> dict[int, list[float]]:
    """The seconds of each all-reduce of this many float32 numbers, for each size.

    The first call compiles, and the next ones are slower than later ones: `warm_up` calls are
    not measured.
    """

    @tf.function(reduce_retracing=True)
    def total(numbers: tf.Tensor) -> tf.Tensor:
        def of_replica(numbers: tf.Tensor) -> tf.Tensor:
            # The copy is on the replica's device; the argument has none.
            own = tf.identity(numbers)
            return tf.distribute.get_replica_context().all_reduce("SUM", own)[0]

        return strategy.run(of_replica, args=(numbers,))

    found = {}
    for size in sizes:
        numbers = tf.ones([size])
        measured = []
        for _ in range(warm_up + repeats):
            began = time.perf_counter()
            assert float(total(numbers)) == strategy.num_replicas_in_sync
            measured.append(time.perf_counter() - began)
        found[size] = measured[warm_up:]
    return found
