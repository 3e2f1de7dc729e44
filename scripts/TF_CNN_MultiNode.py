"""Lesson 08: train on several machines, by TensorFlow's MultiWorkerMirroredStrategy.

    torchrun --standalone --nproc-per-node=2 scripts/TF_CNN_MultiNode.py     two workers here
    sbatch slurm/TF_CNN_MultiNode.slurm                                      on a cluster

A worker is one process. The workers of a machine share its GPUs, or compute on its CPU. If
TF_CONFIG is set, it says where the workers are, else torchrun, srun or mpirun does. --prove
compares with one device. After --epochs 3, --resume OUT/ckpt-3 continues; the two newest
checkpoints are kept.
To begin your own work, copy this file. `multigpu` gives it the course's data and first
weights, makes TF_CONFIG, and proves the result.
"""

import argparse
import json
import math
import os
import sys
from itertools import islice
from pathlib import Path

import numpy as np

from multigpu import data, files, launch, tf_common, tf_config
from multigpu.errors import UserError
from multigpu.launch import rendezvous
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


# Set up the workers: create the strategy


def create_strategy(world, exact):
    """The strategy over all workers, made before TensorFlow's first operation."""
    gpus = tf_common.gpus(already_reported=world.local_rank != 0)
    own = [gpus[number] for number in tf_config.gpus_of_worker(world, len(gpus))]
    # Such as ["10.0.0.1:41763", "10.0.0.2:38233"]: from TF_CONFIG, or with free ports.
    addresses = tf_config.connect_workers(world, gpus=len(own))
    os.environ["TF_CONFIG"] = tf_config.write(addresses, world.rank)
    tf.config.set_visible_devices(own, "GPU")
    cores = len(os.sched_getaffinity(0)) // world.local_size
    tf.config.threading.set_intra_op_parallelism_threads(max(1, cores))
    tf.config.experimental.enable_tensor_float_32_execution(not exact)
    # If a worker dies while TensorFlow connects them, only this deadline ends the others.
    with tf_config.deadline():
        return tf.distribute.MultiWorkerMirroredStrategy()


# Read in the data


def distribute(strategy, images, labels, order, batch_size):
    """One pass in this order: (images, labels, sample weights), a shard for each replica."""
    steps = -(-len(order) // batch_size)
    shard_size = batch_size // strategy.num_replicas_in_sync
    place = np.arange(steps * batch_size)
    numbers = np.resize(order, len(place))  # padded from the beginning
    images_in_batch = np.minimum(batch_size, len(order) - place // batch_size * batch_size)
    sample_weights = (place < len(order)) / images_in_batch

    def gather(numbers, sample_weights):
        return tf.gather(images, numbers), tf.gather(labels, numbers), sample_weights

    def of_worker(context):
        def shards(array):
            by_worker = array.reshape(steps, context.num_input_pipelines, -1, shard_size)
            return by_worker[:, context.input_pipeline_id].reshape(-1, shard_size)

        own = (shards(numbers), shards(sample_weights).astype(np.float32))
        # Endless: if it ended, the workers would ask each other before each batch whether any
        # of them still has one, which takes longer than the step.
        return tf.data.Dataset.from_tensor_slices(own).map(gather).repeat().prefetch(2)

    return islice(strategy.distribute_datasets_from_function(of_worker), steps)


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
        # The sum of the gradients of all replicas of all workers updates each copy.
        optimizer.apply(gradients, model.trainable_variables)
        return tf.reduce_sum(tf.where(sample_weights > 0, losses, 0))

    @tf.function
    def step(*shards):
        losses = strategy.run(replica_step, args=shards)
        return strategy.reduce("SUM", losses, axis=None)

    return step


# Evaluate the model


def test_step(strategy, model):
    """A function that returns how many images of a global batch the model names correctly."""

    def replica_step(images, labels, sample_weights):
        right = tf.argmax(model(images), axis=1) == labels
        return tf.reduce_sum(tf.cast(right & (sample_weights > 0), tf.float32))

    @tf.function
    def step(*shards):
        hits = strategy.run(replica_step, args=shards)
        return strategy.reduce("SUM", hits, axis=None)

    return step


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Train with MultiWorkerMirroredStrategy.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/TF_CNN_MultiNode"))
    parser.add_argument("--resume", metavar="CHECKPOINT", help="go on from a run's ckpt-N")
    parser.add_argument("--prove", action="store_true", help="compare with one device")
    args = parser.parse_args(arguments)
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size are from 1 up")
    return args


def main(args):
    world = tf_config.find_world()  # by TF_CONFIG, or by the launcher's variables
    with tf_config.report_lost_worker(world):  # in one sentence
        run(args, world)


def run(args, world):
    chief = world.rank == 0
    strategy = create_strategy(world, exact=args.prove)
    replicas = strategy.num_replicas_in_sync
    rendezvous.same_everywhere(world, "the command line", vars(args))
    with rendezvous.fail_together(world):  # an error on one worker ends all of them
        tf_common.check_batch(args.batch_size, replicas)
        if chief:
            files.writable_folder(args.out)
        train, test = data.load(data.fetch(args.data))

    shape = tf_common.shape(train)
    with strategy.scope():
        model = cnn(shape, args.seed)
        optimizer = tf.keras.optimizers.SGD(args.lr, momentum=0.9)
        optimizer.build(model.trainable_variables)
    epochs_done = tf.Variable(0)
    settings = tf.Variable(f"--batch-size {args.batch_size} --lr {args.lr} --seed {args.seed}")
    parts = {"model": model, "optimizer": optimizer, "epochs": epochs_done}
    checkpoint = tf.train.Checkpoint(**parts, settings=settings)
    manager = tf.train.CheckpointManager(checkpoint, str(args.out), max_to_keep=2)
    with rendezvous.fail_together(world):
        if args.resume:
            tf_common.restore(checkpoint, args.resume)
        if int(epochs_done) >= args.epochs:
            raise UserError(f"{args.resume} has {int(epochs_done)} epochs: give more.")

    if chief:
        gpus = bool(tf.config.get_visible_devices("GPU"))
        print(tf_config.describe(world, replicas, gpus), flush=True)
    train_images, test_images = tf_common.tensors(train), tf_common.tensors(test)
    # Made once: each new tf.function is traced again.
    step, count = train_step(strategy, model, optimizer), test_step(strategy, model)
    for epoch in range(int(epochs_done), args.epochs):
        order = tf_common.epoch_order(len(train), epoch, args.seed)
        batches = distribute(strategy, *train_images, order, args.batch_size)
        losses = [step(*shards) for shards in batches]
        # Only now: float() waits until the device has computed the number.
        loss = sum(map(float, losses)) / len(train)
        if not math.isfinite(loss):
            text = f"the loss is {loss} in epoch {epoch + 1}: lower --lr."
            raise UserError(text, already_reported=not chief)
        batches = distribute(strategy, *test_images, np.arange(len(test)), 256 * replicas)
        hits = [count(*shards) for shards in batches]
        accuracy = sum(map(float, hits)) / len(test)
        epochs_done.assign(epoch + 1)
        # The model has no BatchNorm, so the chief's copy is enough.
        if chief:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
            manager.save(checkpoint_number=epoch + 1)

    holds = True
    # The others wait for the chief: TensorFlow reports a worker that leaves early as lost.
    with tf_config.without_timeout(), rendezvous.fail_together(world):
        if chief:
            model.save(args.out / "model.keras")
            results = {"loss": loss, "accuracy": accuracy}
            (args.out / "metrics.json").write_text(json.dumps(results))
            if args.prove:
                claim = f"MultiWorker on {replicas} replicas equals one device"
                holds = tf_common.prove(claim, model, cnn(shape, args.seed), train, args)
    if not holds:
        sys.exit(1)


if __name__ == "__main__":
    launch.start(main, parse())
