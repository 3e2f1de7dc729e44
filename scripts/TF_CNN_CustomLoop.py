"""Lesson 07: train on the GPUs of one machine, by MirroredStrategy and a loop by hand.

    python scripts/TF_CNN_CustomLoop.py             on GPUs, or two logical devices of the CPU
    python scripts/TF_CNN_CustomLoop.py --prove     do they equal one device?
    sbatch slurm/TF_CNN_CustomLoop.slurm            on a cluster

To begin your own work, copy this file. `multigpu` gives it the course's data and first
weights, divides a CPU into logical devices, and proves the result.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from multigpu import data, files, launch, tf_common
from multigpu.errors import UserError
from multigpu.tf_common import tf  # TensorFlow, without the messages of its start

# Design the model


def cnn(shape, seed):
    """Images (batch, height, width, channels) → logits (batch, 10).

    It begins with the weights that PyTorch draws for `seed`.
    """
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape),
            layers.Conv2D(16, kernel_size=3, padding="same", activation="tanh"),
            layers.ZeroPadding2D(1),  # on both sides; "same" pads one side at a stride of 2
            layers.Conv2D(32, kernel_size=3, strides=2, activation="tanh"),
            layers.Flatten(),
            layers.Dense(64, activation="tanh"),
            layers.Dense(10),
        ]
    )
    # With other layers, leave this out, and call tf.keras.utils.set_random_seed(seed) first.
    model.set_weights(tf_common.first_weights(shape, seed))
    return model


# Read in the data


def read_data(images, labels, epoch, batch_size, seed):
    """One epoch, in PyTorch's order: global batches of (images, labels, sample weights)."""

    def gather(rows):
        sample_weight = 1 / tf.cast(tf.size(rows), tf.float32)  # 1 / the global batch
        sample_weights = tf.fill(tf.shape(rows), sample_weight)
        return tf.gather(images, rows), tf.gather(labels, rows), sample_weights

    order = tf_common.epoch_order(len(labels), epoch, seed)
    rows = tf.data.Dataset.from_tensor_slices(order).batch(batch_size)
    return rows.map(gather, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


# Create a MirroredStrategy


def create_strategy(count, exact):
    """The strategy, with a replica on each of `count` devices (None: on all GPUs)."""
    devices = tf_common.devices(count, exact)
    print(tf_common.describe(devices), flush=True)
    return tf.distribute.MirroredStrategy(devices)


# Open the strategy's scope


def make(strategy, shape, lr, seed):
    """The model and the optimizer. Each replica has a copy of the weights and the momentum."""
    with strategy.scope():
        model = cnn(shape, seed)
        optimizer = tf.keras.optimizers.SGD(lr, momentum=0.9)
        optimizer.build(model.trainable_variables)
    return model, optimizer


# Train the model


def train_step(strategy, model, optimizer):
    """A function that trains on one global batch and returns the sum of its images' losses."""
    cross_entropy = tf.keras.losses.sparse_categorical_crossentropy

    def replica_step(images, labels, sample_weights):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = cross_entropy(labels, logits, from_logits=True)
            loss = tf.reduce_sum(losses * sample_weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        # The sum of the gradients over all replicas updates each replica's copy.
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return tf.reduce_sum(losses)

    @tf.function(reduce_retracing=True)
    def step(shards):
        losses = strategy.run(replica_step, args=shards)
        return strategy.reduce("SUM", losses, axis=None)

    return step


def train_epoch(strategy, step, batches):
    """Train for one epoch. Returns, for each step, what `step` returns."""
    losses = [step(shards) for shards in strategy.experimental_distribute_dataset(batches)]
    return [float(loss) for loss in losses]  # only now: float() waits for the device


# Evaluate the model


def test_step(strategy, model):
    """A function that returns how many images of a global batch the model names correctly."""

    def replica_step(images, labels, sample_weights):
        right = tf.argmax(model(images), axis=1) == labels
        # Sample weight 0: the image pads the batch, so that each replica gets some.
        return tf.reduce_sum(tf.cast(right & (sample_weights > 0), tf.float32))

    @tf.function
    def step(shards):
        hits = strategy.run(replica_step, args=shards)
        return strategy.reduce("SUM", hits, axis=None)

    return step


def count_hits(strategy, step, batches):
    """How many images of all batches the model names correctly."""
    hits = [step(shards) for shards in strategy.experimental_distribute_dataset(batches)]
    return sum(float(count) for count in hits)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Train with MirroredStrategy, by hand.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, help="replicas (default: all GPUs, or 2)")
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/TF_CNN_CustomLoop"))
    parser.add_argument("--prove", action="store_true", help="compare with one device")
    args = parser.parse_args(arguments)
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size are from 1 up")
    return args


def main(args):
    launch.single_process_world("TF_CNN_CustomLoop")
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    strategy = create_strategy(args.devices, exact=args.prove)
    replicas = strategy.num_replicas_in_sync
    tf_common.check_shards(len(train), args.batch_size, replicas)
    images, labels = tf_common.tensors(train)
    shape = tf_common.shape(train)
    model, optimizer = make(strategy, shape, args.lr, args.seed)
    # Made once: each new tf.function is traced again.
    step, count = train_step(strategy, model, optimizer), test_step(strategy, model)
    test_batches = tf_common.padded_batches(test, 256, replicas)
    for epoch in range(args.epochs):
        batches = read_data(images, labels, epoch, args.batch_size, args.seed)
        loss = sum(train_epoch(strategy, step, batches)) / len(train)
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} in epoch {epoch + 1}: lower --lr.")
        accuracy = count_hits(strategy, count, test_batches) / len(test)
        # Display the results
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)

    model.save(args.out / "model.keras")
    results = {"loss": loss, "accuracy": accuracy}
    (args.out / "metrics.json").write_text(json.dumps(results))
    claim = f"custom loop on {replicas} replicas equals one device"
    if args.prove and not tf_common.prove(claim, model, cnn(shape, args.seed), train, args):
        sys.exit(1)


if __name__ == "__main__":
    launch.start(main, parse())
