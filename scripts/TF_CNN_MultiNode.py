# %% [markdown]
# # 08 · TensorFlow on several nodes: MultiWorkerMirroredStrategy
# **The question.** The TensorFlow script of lesson 07 fills one node. I have two. Who tells the processes of each other, who
# reads which image, who writes the checkpoint, and what happens when one of them dies?
#
# **Predict first.** (1) Two workers read the same data set, in batches of 64 images: how often does each image come in an
# epoch, for each way of auto-sharding? (2) Both workers save the model to the same path: what for? (3) A worker is killed:
# how soon do the others notice?

# %%
import argparse
import json
import os
import signal
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from multigpu import checkpoint, data, files, flags, launch, metrics, rendezvous, tensorflow, tf_config
from multigpu.tensorflow import tf  # TensorFlow, without the messages of its start

# %% [markdown]
# ## Step 0 · The flags


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser("TF_CNN_MultiNode", "Train a CNN with MultiWorkerMirroredStrategy: one process a worker.")
    parser.add_argument("--resume", nargs="?", const="", metavar="FILE", help="go on from FILE, or OUT/last.pt if any")
    parser.add_argument("--spawn", metavar="N", help="start N workers on this machine")
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · Set up the workers
# Every worker gets the same list of addresses, and its own number, in one variable: `TF_CONFIG`. Worker 0 is the **chief**.
# The strategy then waits for all of them, up to an hour, and hears no signal meanwhile. So they meet elsewhere first, where
# a worker that does not come is named soon: at the rendezvous of lesson 05. Its gloo group carries words only; the
# gradients are TensorFlow's.


# %%
def set_up(args: argparse.Namespace, world: launch.World) -> tuple[tf.distribute.Strategy, torch.device]:
    gpus = tf.config.list_physical_devices("GPU")
    mine = tf_config.share(world, len(gpus))
    device = torch.device("cuda" if mine else "cpu")
    store = rendezvous.meet(world, device)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    rendezvous.same_everywhere(world, "the number of GPUs", len(mine))
    workers = tf_config.workers(world)  # ["10.0.0.1:41763", "10.0.0.2:38233"]
    task = {"type": "worker", "index": world.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    tf.config.set_visible_devices([gpus[number] for number in mine], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
    tf.config.experimental.enable_tensor_float_32_execution(not args.prove)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # all GPUs that it sees, or the CPU as one device
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # TensorFlow took it, and scancel's would be lost
    return strategy, device


# %% [markdown]
# ## Step 2 · Design the model
# Variables that are made in the strategy's scope are mirrored on all replicas of all workers, and start with the chief's
# values. The optimizer's are among them, so it is built there, too.


# %%
@dataclass
class Run:
    args: argparse.Namespace
    world: launch.World
    strategy: tf.distribute.Strategy
    model: tf.keras.Model
    optimizer: tf.keras.optimizers.Optimizer


class Variables:
    """What a checkpoint saves and restores. All workers hold the same, so what the chief saves is enough."""

    def __init__(self, variables: list):
        self.named = {f"{number}.{variable.name}": variable for number, variable in enumerate(variables)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.array(variable)) for name, variable in self.named.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, variable in self.named.items():
            variable.assign(state[name].numpy())


# %% [markdown]
# ## Step 3 · Read in the data
# TensorFlow can share out the images by itself (`AutoShardPolicy`), by rules that depend on how the data set was made. Here
# it is explicit: each worker is asked for its own data set, and takes from each global batch what is its replicas' part.
# An image's **weight** is 1 / (images in this global batch). The last batch is filled up with images of weight 0: then all
# pieces have the same shape, and no replica is without an image, which a convolution would not bear.


# %%
def deal(run: Run, images: np.ndarray, labels: np.ndarray, order: np.ndarray, batch: int) -> tf.distribute.DistributedDataset:
    """One pass over the images in this order: global batches of (images, labels, weights), a piece for each replica."""
    steps, piece = -(-len(order) // batch), batch // run.strategy.num_replicas_in_sync
    numbers = np.resize(order, steps * batch)  # filled up from the beginning
    place = np.arange(steps * batch)
    weights = (place < len(order)) / np.minimum(batch, len(order) - place // batch * batch)

    def own(context: tf.distribute.InputContext) -> tf.data.Dataset:
        shape = steps, context.num_input_pipelines, -1, piece
        mine = [a.reshape(shape)[:, context.input_pipeline_id].reshape(-1, piece) for a in (numbers, weights)]
        cut = tf.data.Dataset.from_tensor_slices((mine[0], mine[1].astype(np.float32)))
        return cut.map(lambda n, weight: (tf.gather(images, n), tf.gather(labels, n), weight)).prefetch(2)

    return run.strategy.distribute_datasets_from_function(own)


# %% [markdown]
# ## Step 4 · Train and evaluate
# A replica's loss is the **sum** of loss × weight over its piece, since the strategy adds up the replicas' gradients: the sum
# of the sums is the mean over the global batch. (The mean over the own piece would be as many times too large as there are
# replicas.) Keras's `fit` does not run under this strategy; see the end.


# %%
def train_step(run: Run):
    def replica(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = run.model(images, training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.reduce_sum(losses * weights)
        gradients = tape.gradient(loss, run.model.trainable_variables)
        run.optimizer.apply(gradients, run.model.trainable_variables)  # adds up over all replicas, then updates
        return loss

    return everywhere(run, replica)


def test_step(run: Run):
    def replica(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        right = tf.argmax(run.model(images, training=False), axis=1) == labels
        return tf.reduce_sum(tf.cast(right & (weights > 0), tf.float32))

    return everywhere(run, replica)


def everywhere(run: Run, replica):
    """A function of a batch that runs `replica` on each piece, and returns the sum of what all replicas returned."""
    strategy = run.strategy
    return tf.function(lambda *batch: strategy.reduce("SUM", strategy.run(replica, args=batch), axis=None))


# %% [markdown]
# ## All together
# One voice, and one writer: the chief prints, and saves after each epoch.


# %%
def main(args: argparse.Namespace) -> None:
    world = tf_config.find()  # TF_CONFIG's, if somebody has written it; else torchrun's, srun's or mpirun's
    with tf_config.company(world):  # a worker that is gone is one sentence on the others
        train_and_report(args, world)


def train_and_report(args: argparse.Namespace, world: launch.World) -> None:
    strategy, device = set_up(args, world)
    replicas, chief = strategy.num_replicas_in_sync, world.rank == 0
    say = print if chief else lambda *_, **__: None
    with rendezvous.together(world):  # all workers leave this block, or none
        args.batch_size, piece = flags.split(args.batch_size, replicas)
        if chief:
            files.writable_folder(args.out)
        if world.local_rank == 0:
            data.fetch(args.data)  # one worker a node fetches …
    with rendezvous.together(world):
        train, test = data.load(data.fetch(args.data))  # … and the others find it there
    rendezvous.same_everywhere(world, "the training data", data.checksum(train))

    def new_model() -> tf.keras.Model:
        return tensorflow.cnn(tuple(train[0][0].shape), data.classes(train, test), args.seed)

    with strategy.scope():
        model = new_model()
        optimizer = tf.keras.optimizers.SGD(args.lr, momentum=0.9)
        optimizer.build(model.trainable_variables)
    run = Run(args, world, strategy, model, optimizer)
    same = {"--batch-size": args.batch_size, "--seed": args.seed, "--lr": args.lr}
    same["--data (its checksum)"] = data.checksum(train)
    parts = {"model": Variables(model.variables), "optimizer": Variables(optimizer.variables)}
    last = checkpoint.Checkpoint(args.out / "last.pt", parts, same, world)
    at = last.load(args.resume) or {"epoch": 0, "step": 0, "history": []}

    say(tf_config.describe(world, replicas, device.type == "cuda"))
    say(f"global batch {args.batch_size} = {replicas} (replicas) × {piece} (images)\n")
    say(metrics.opening(at, args, last.loaded, world), flush=True)
    args.epochs = max(args.epochs, at["epoch"])
    (images, labels), tested = tensorflow.arrays(train), tensorflow.arrays(test)
    step, count = train_step(run), test_step(run)
    for epoch in range(at["epoch"], args.epochs):
        began, total = time.perf_counter(), 0.0
        order = tensorflow.order(len(train), epoch, args.seed)
        for number, batch in enumerate(deal(run, images, labels, order, args.batch_size)):
            total += float(step(*batch)) * min(args.batch_size, len(train) - number * args.batch_size)
        loss, speed = total / len(train), len(train) / (time.perf_counter() - began)
        metrics.finite(loss, epoch, world)
        right = sum(float(count(*batch)) for batch in deal(run, *tested, np.arange(len(test)), 256 * replicas))
        row = {"epoch": epoch + 1, "loss": loss, "test_accuracy": right / len(test), "images_per_s": speed}
        say(metrics.row(row), flush=True)
        at = {**at, "epoch": epoch + 1, "history": [*at["history"], row]}
        last.save(at)

    verdict = None
    with rendezvous.together(world):  # the others wait for the chief: a worker that leaves early counts as dead
        if chief and args.prove:
            what = f"MultiWorkerMirroredStrategy with {replicas} replicas equals one device"
            verdict = tensorflow.against_serial(what, model, new_model(), train, args)
    if chief:
        metrics.report(args.out, world, device, at["history"], verdict, devices=replicas, batch_size=args.batch_size)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())
