"""The longer experiments of lesson 07: copies, shards, gradients by rule, BatchNorm."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from multigpu import plots
from multigpu.tf_common import tf

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def copies(strategy: tf.distribute.Strategy, variable: tf.keras.Variable) -> list[np.ndarray]:
    """The variable's copies on the strategy's devices, rounded: the first three numbers."""
    return [copy.ravel()[:3].round(4) for copy in values(strategy, variable.value)]


def values(strategy: tf.distribute.Strategy, per_replica: tf.Tensor) -> list[np.ndarray]:
    """The value that each replica has."""
    return [copy.numpy() for copy in strategy.experimental_local_results(per_replica)]


def difference(
    values: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray
) -> float:
    """The largest distance between two numbers at the same place."""
    return float(np.abs(np.subtract(values, other)).max())


def largest_change(
    before: list[np.ndarray], after: list[np.ndarray], momentum: np.ndarray
) -> None:
    """Print by how much each replica's copy of one weight has changed, and its momentum.

    It is the weight that has changed most on replica 0.
    """
    changes = [new - old for new, old in zip(after, before, strict=True)]
    place = np.abs(changes[0]).argmax()
    for replica, change in enumerate(changes):
        print(f"replica {replica}: the weight has changed by {change.flat[place]:.5f}")
    print(f"the momentum, which has one copy: {momentum.flat[place]:.5f}")


def by_own_shard(
    images: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """A global batch with sample weights 1 / (images of the own shard), for two replicas.

    Of 29 images, 15 have 1 / 15, and 14 have 1 / 14.
    """
    rows = tf.size(labels)  # the strategy will give replica 0 the first half, rounded up
    first = (rows + 1) // 2
    shard_rows = tf.where(tf.range(rows) < first, first, rows - first)
    return images, labels, 1 / tf.cast(shard_rows, tf.float32)


def shard_sizes(strategy: tf.distribute.Strategy, batches: tf.data.Dataset) -> list[list[int]]:
    """For each global batch, the number of images in each replica's shard."""
    return [
        [len(shard) for shard in strategy.experimental_local_results(labels)]
        for _, labels, _ in strategy.experimental_distribute_dataset(batches)
    ]


def gradients_by_rule(
    strategy: tf.distribute.Strategy,
    w: tf.Variable,
    rules: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]],
    batches: list[list[float]],
) -> dict[int, dict[str, list[float]]]:
    """Each replica's gradient of the loss, for each batch and each rule.

    The loss of a number is (w - number)². A rule makes one loss of a shard's losses and the
    size of the global batch. The result's keys are the size and the rule's name.
    """

    def of_replica(shard: tf.Tensor, size: tf.Tensor) -> dict[str, tf.Tensor]:
        gradients = {}
        for name, rule in rules.items():
            with tf.GradientTape() as tape:
                loss = rule((w - shard) ** 2, size)
            gradients[name] = tape.gradient(loss, w)
        return gradients

    @tf.function
    def step(batch: tf.Tensor, size: tf.Tensor) -> dict[str, tf.Tensor]:
        return strategy.run(of_replica, args=(batch, size))

    by_size = {}
    for numbers in batches:
        size = len(numbers)
        dataset = tf.data.Dataset.from_tensor_slices(numbers).batch(size)
        (batch,) = strategy.experimental_distribute_dataset(dataset)
        by_size[size] = {
            name: [float(copy) for copy in strategy.experimental_local_results(gradients)]
            for name, gradients in step(batch, tf.constant(float(size))).items()
        }
    return by_size


def gradient_bars(gradients: dict[int, dict[str, list[float]]], right: float) -> "Figure":
    """Draw the replicas' gradients, one bar per rule, and a dotted line at the right sum.

    gradients[rows of the batch][rule] is each replica's gradient. All gradients have the sign
    of `right`. The title names the rules whose sums are right for all batches.
    """
    rules = list(next(iter(gradients.values())))
    exact = [
        rule
        for rule in rules
        if all(abs(sum(batch[rule]) - right) < 1e-5 for batch in gradients.values())
    ]
    fig = plots.figure(8, 3.4)
    axes = fig.add_subplot()
    names = []
    for size, batch in gradients.items():
        for rule, of_replicas in batch.items():
            left = 0.0
            for replica, gradient in enumerate(of_replicas):
                axes.barh(
                    len(names),
                    gradient,
                    left=left,
                    height=0.7,
                    color=plots.RANKS[replica],
                    edgecolor=plots.EDGE,
                    linewidth=0.6,
                )
                text = "white" if replica in plots.WHITE_TEXT_RANKS else "black"
                style = {"ha": "center", "va": "center", "color": text, "fontsize": 8}
                axes.text(left + gradient / 2, len(names), f"replica {replica}", **style)
                left += gradient
            names.append(f"{size} numbers: {rule}")
    axes.axvline(right, color=plots.INK, linestyle=":", linewidth=2)
    subject = " and ".join(exact) if exact else "no rule"
    axes.set(title=f"Right for both batches: {subject}")
    axes.set_xlabel("gradient (dotted line: one device)")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    if right < 0:
        axes.invert_xaxis()  # so that all bars begin at the left
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return fig


def batch_norm_step(
    strategy: tf.distribute.Strategy, images: np.ndarray, labels: np.ndarray, **settings: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One forward and backward of a small network with BatchNorm, from the same weights.

    Returns the gradient as one vector, the sum over the replicas; and BatchNorm's new moving
    mean, each replica's copy. The images (n, height, width, channels) and labels (n,) are one
    global batch. `settings` are BatchNormalization's.
    """
    with strategy.scope():
        tf.keras.utils.set_random_seed(0)
        norm = tf.keras.layers.BatchNormalization(momentum=0.9, **settings)
        model = tf.keras.Sequential(
            [
                tf.keras.Input(images.shape[1:]),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(32),
                norm,
                tf.keras.layers.Activation("tanh"),
                tf.keras.layers.Dense(10),
            ]
        )
    cross_entropy = tf.keras.losses.sparse_categorical_crossentropy

    def gradient_of_replica(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = cross_entropy(labels, logits, from_logits=True)
            loss = tf.reduce_sum(losses) / rows
        gradients = tape.gradient(loss, model.trainable_variables)
        return tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], axis=0)

    @tf.function
    def step(batch: tuple) -> tf.Tensor:
        gradients = strategy.run(gradient_of_replica, args=batch)
        return strategy.reduce("SUM", gradients, axis=None)

    rows = len(labels)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(rows)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    # A concrete function, because TensorFlow warns if one tf.function is made five times.
    gradient = step.get_concrete_function(batch)(batch)
    copies = strategy.experimental_local_results(norm.moving_mean.value)
    return gradient.numpy(), [copy.numpy() for copy in copies]
