"""The longer experiments of lesson 07: an epoch's time, gradients drawn, BatchNorm."""

import time
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from multigpu import plots
from multigpu.tf_common import tf

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def epoch_seconds(
    dataset: Iterable, step: float, repeats: int = 3
) -> tuple[float, float, float]:
    """The shortest, median and longest seconds of an epoch over `dataset`.

    A training step of `step` seconds follows each batch. One epoch before warms up.
    """
    measured = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        for _ in dataset:
            time.sleep(step)
        measured.append(time.perf_counter() - began)
    warm = measured[1:]
    return min(warm), median(warm), max(warm)


def gradient_bars(found: dict[int, dict[str, list[float]]], right: float) -> "Figure":
    """Draw the replicas' gradients, one bar per rule, and a dotted line at the right sum.

    found[rows of the batch][rule] is each replica's gradient. All gradients have the sign of
    `right`. The title names the rules whose sums are right for all batches.
    """
    rules = list(next(iter(found.values())))
    exact = [
        rule
        for rule in rules
        if all(abs(sum(batch[rule]) - right) < 1e-5 for batch in found.values())
    ]
    fig = plots.figure(8, 3.4)
    axes = fig.add_subplot()
    names = []
    for size, batch in found.items():
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
