"""Lesson 07: train on the GPUs of one machine, by MirroredStrategy and Keras's fit.

    python scripts/TF_CNN_MultiGPU.py             on GPUs, or two logical devices of the CPU
    python scripts/TF_CNN_MultiGPU.py --prove     do they equal one device?
    sbatch slurm/TF_CNN_MultiGPU.slurm            on a cluster

To begin your own work, copy this file. `multigpu` gives it the course's data and first
weights, divides a CPU into logical devices, and proves the result.
"""

import argparse
import json
import math
import sys
import time
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


def read_data(train, epochs, batch_size, seed):
    """All epochs, in PyTorch's order: global batches of (images, labels, sample weights)."""
    images, labels = tf_common.tensors(train)

    def gather(rows):
        sample_weight = 1 / tf.cast(tf.size(rows), tf.float32)  # 1 / the global batch
        sample_weights = tf.fill(tf.shape(rows), sample_weight)
        return tf.gather(images, rows), tf.gather(labels, rows), sample_weights

    def batches_of(order):
        return tf.data.Dataset.from_tensor_slices(order).batch(batch_size)

    orders = [tf_common.epoch_order(len(train), epoch, seed) for epoch in range(epochs)]
    rows = tf.data.Dataset.from_tensor_slices(orders).flat_map(batches_of)
    return rows.map(gather, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


# Create a MirroredStrategy


def create_strategy(count, exact):
    """The strategy, with a replica on each of `count` devices (None: on all GPUs)."""
    devices = tf_common.devices(count, exact)
    print(tf_common.describe(devices), flush=True)
    return tf.distribute.MirroredStrategy(devices)


# Open the strategy's scope


def make(strategy, shape, lr, seed):
    """The compiled model. Each replica has a copy of its weights and the optimizer's state."""
    keras = tf.keras
    with strategy.scope():
        model = cnn(shape, seed)
        optimizer = keras.optimizers.SGD(lr, momentum=0.9)
        # The sum of loss × sample weight. Keras divides only a mean by the number of replicas.
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        mean_loss = keras.metrics.SparseCategoricalCrossentropy("mean_loss", from_logits=True)
        # A weighted metric leaves out images with sample weight 0, which pad a test batch.
        model.compile(optimizer, loss, metrics=[mean_loss], weighted_metrics=["accuracy"])
    return model


# Train and evaluate the model


def train_and_evaluate(model, batches, steps, epochs, test_batches, callbacks):
    """Train for all epochs, and evaluate after each. Returns the losses and accuracies."""
    run = model.fit(
        batches,
        epochs=epochs,
        steps_per_epoch=steps,
        shuffle=False,  # read_data has shuffled
        validation_data=test_batches,
        callbacks=callbacks,
        verbose=0,
    )
    return run.history["mean_loss"], run.history["val_accuracy"]


# Display the results


class Display(tf.keras.callbacks.Callback):
    """Prints a line after each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        loss, accuracy = logs["mean_loss"], logs["val_accuracy"]
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} in epoch {epoch + 1}: lower --lr.")
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Train a CNN with MirroredStrategy and fit.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, help="replicas (default: all GPUs, or 2)")
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/TF_CNN_MultiGPU"))
    parser.add_argument("--prove", action="store_true", help="compare with one device")
    args = parser.parse_args(arguments)
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size are from 1 up")
    return args


def main(args):
    launch.single_process_world("TF_CNN_MultiGPU")
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    strategy = create_strategy(args.devices, exact=args.prove)
    replicas = strategy.num_replicas_in_sync
    tf_common.check_shards(len(train), args.batch_size, replicas, fit=True)
    shape = tf_common.shape(train)
    model = make(strategy, shape, args.lr, args.seed)
    log = args.out / "tensorboard" / time.strftime("%Y%m%d-%H%M%S")  # one folder per run
    losses, accuracies = train_and_evaluate(
        model,
        read_data(train, args.epochs, args.batch_size, args.seed),
        -(-len(train) // args.batch_size),
        args.epochs,
        tf_common.padded_batches(test, 256, replicas),
        [Display(), tf.keras.callbacks.TensorBoard(log)],
    )
    model.save(args.out / "model.keras")
    results = {"loss": losses[-1], "accuracy": accuracies[-1]}
    (args.out / "metrics.json").write_text(json.dumps(results))
    claim = f"fit on {replicas} replicas equals one device"
    if args.prove and not tf_common.prove(claim, model, cnn(shape, args.seed), train, args):
        sys.exit(1)


if __name__ == "__main__":
    launch.start(main, parse())
