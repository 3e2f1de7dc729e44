# %% [markdown]
# # 08 · TensorFlow on several nodes: MultiWorkerMirroredStrategy
# **The question.** The TensorFlow script of lesson 07 fills one node. I have two. Who tells the processes of each other, who
# reads which image, who writes the checkpoint, and what if one of them dies?
#
# **Predict first.** (1) Two workers read the same 8 images, in batches of 4: which does each get, when TensorFlow shards? (2)
# Each worker makes the model with a seed of its own: do they start alike? (3) A worker is killed: what do the others do?

# %%
import argparse
import json
import os
import time

import numpy as np
import torch

from multigpu import (
    checkpoint,
    data,
    files,
    flags,
    launch,
    metrics,
    rendezvous,
    tf_common,
    tf_config,
)
from multigpu.errors import pluralize
from multigpu.tf_common import tf  # TensorFlow, without the messages of its start


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "TF_CNN_MultiNode",
        "Train a CNN with MultiWorkerMirroredStrategy: one process a worker.",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FILE",
        help="go on from FILE, or OUT/last.pt if any",
    )
    parser.add_argument("--spawn", metavar="N", help="start N workers on this machine")
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · Set up the workers
# One variable tells each worker where all are, and which it is: `TF_CONFIG`. Worker 0 is the **chief**. TensorFlow waits an
# hour for a worker that never comes, deaf to signals. So `tf_config.meet` brings them together first, as lesson 05 does; it
# names a worker that is missing. Its gloo group carries words; the gradients are TensorFlow's.


# %%
def set_up(
    args: argparse.Namespace, world: launch.World
) -> tuple[tf.distribute.Strategy, torch.device]:
    gpus = tf_common.gpus(quiet=world.local_rank != 0)
    mine = tf_config.share(world, len(gpus))  # several workers on a node: each takes its share
    workers = tf_config.meet(world, gpus=len(mine))  # ["10.0.0.1:41763", "10.0.0.2:38233"]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": world.rank}}
    os.environ["TF_CONFIG"] = json.dumps(config)
    tf.config.set_visible_devices([gpus[number] for number in mine], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(
        max(1, len(os.sched_getaffinity(0)) // world.local_size)
    )
    tf.config.experimental.enable_tensor_float_32_execution(not args.prove)
    with tf_config.deadline():  # should one die just now
        strategy = (
            tf.distribute.MultiWorkerMirroredStrategy()
        )  # all GPUs that it sees, or the CPU as one device
    return strategy, torch.device("cuda" if mine else "cpu")


# %% tags=["active-ipynb"]
# def automatic():  # runs in two processes, as all that `launch.call` calls
#     """Which images does this worker read in an epoch?"""
#     strategy, _ = set_up(parse([]), tf_config.find())
#     options, read = tf.data.Options(), {}
#     for policy in ("AUTO", "DATA", "OFF"):
#         options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
#         images = tf.data.Dataset.from_tensor_slices(range(8)).batch(4).with_options(options)
#         batches = strategy.experimental_distribute_dataset(images)
#         read[policy] = [strategy.experimental_local_results(batch)[0].numpy().tolist() for batch in batches]
#     return read
#
#
# first, second = launch.call(automatic, 2)
# for policy in first:
#     print(f"{policy}: worker 0 reads {first[policy]}, worker 1 {second[policy]}")

# %% [markdown]
# (1) `AUTO` is `DATA` here: half of each batch. With `OFF` each worker reads all images, and each counts twice in an epoch.
#
# **On Slurm**, `SlurmClusterResolver` writes the list for you. With these nodes, Slurm starts rank 0 on `n2`:

# %% tags=["active-ipynb"]
# step = {"NODELIST": "n[2,10]", "TASKS_PER_NODE": "1(x2)", "NUM_TASKS": "2"}
# os.environ.update({"SLURM_PROCID": "0", **{f"SLURM_STEP_{name}": value for name, value in step.items()}})
# print(tf.distribute.cluster_resolver.SlurmClusterResolver(gpus_per_node=2, auto_set_gpu=False).cluster_spec())
# for name in [name for name in os.environ if name.startswith("SLURM_")]:
#     os.environ.pop(name)

# %% [markdown]
# It sorts the nodes as text, so rank 0, on `n2`, is told that it is on `n10`. The port is the same for every job, and on nodes
# without GPUs it divides by nothing. So this lesson writes the list itself.
#
# ## Step 2 · Read in the data
# Not automatically: each worker is asked for its own data set, and takes its replicas' part of each global batch. A
# **weight** is 1 / (images in this batch). The last batch is filled up with images of weight 0, so that no replica is without.


# %%
def deal(
    strategy: tf.distribute.Strategy, images, labels, order, batch: int
) -> tf.distribute.DistributedDataset:
    """One pass over the images in this order: global batches of (images, labels, weights), a piece for each replica."""
    steps, piece = -(-len(order) // batch), batch // strategy.num_replicas_in_sync
    numbers, place = (
        np.resize(order, steps * batch),
        np.arange(steps * batch),
    )  # filled up from the beginning
    weights = (place < len(order)) / np.minimum(batch, len(order) - place // batch * batch)

    def own(context: tf.distribute.InputContext) -> tf.data.Dataset:
        shape = steps, context.num_input_pipelines, -1, piece
        mine = [
            a.reshape(shape)[:, context.input_pipeline_id].reshape(-1, piece)
            for a in (numbers, weights)
        ]
        cut = tf.data.Dataset.from_tensor_slices((mine[0], mine[1].astype(np.float32)))
        return cut.map(
            lambda n, weight: (tf.gather(images, n), tf.gather(labels, n), weight)
        ).prefetch(2)

    return strategy.distribute_datasets_from_function(own)


# %% [markdown]
# ## Step 3 · Train and evaluate
# The strategy **adds up** the replicas' gradients. So a replica's loss is the sum of loss × weight over its piece: the sum of
# the sums is the mean over the global batch.


# %%
def everywhere(strategy: tf.distribute.Strategy, replica):
    """A function of a batch that runs `replica` on each piece, and returns the sum of what the replicas returned."""
    return tf.function(
        lambda *batch: strategy.reduce("SUM", strategy.run(replica, args=batch), axis=None)
    )


def train_step(
    strategy: tf.distribute.Strategy, model: tf.keras.Model, optimizer: tf.keras.Optimizer
):
    def replica(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
            loss = tf.reduce_sum(losses * weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(
            gradients, model.trainable_variables
        )  # adds up over all replicas, then updates
        return loss

    return everywhere(strategy, replica)


def test_step(strategy: tf.distribute.Strategy, model: tf.keras.Model):
    def replica(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        right = tf.argmax(model(images, training=False), axis=1) == labels
        return tf.reduce_sum(tf.cast(right & (weights > 0), tf.float32))

    return everywhere(strategy, replica)


# %% [markdown]
# And `fit`? And (2), models made from two seeds?

# %% tags=["active-ipynb"]
# def try_out():
#     """What fit says, and this worker's weights added up: of a model drawn in the scope, and of one set there."""
#     world = tf_config.find()
#     strategy, _ = set_up(parse([]), world)
#     with strategy.scope():
#         tf.keras.utils.set_random_seed(world.rank)
#         drawn = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10)])
#         put = tf_common.cnn(seed=world.rank)  # ends with model.set_weights
#         drawn.compile("sgd", "mse")
#     try:
#         drawn.fit(np.zeros((4, 64)), np.zeros((4, 10)), batch_size=4, verbose=0)
#     except ValueError as error:
#         message = str(error).splitlines()[0]
#     return message, *(sum(float(weight.sum()) for weight in model.get_weights()) for model in (drawn, put))
#
#
# told = list(zip(*launch.call(try_out, 2)))
# print(f"TensorFlow {tf.__version__}, Keras {tf.keras.__version__}, fit: {told[0][0]} …")
# for how, sums in zip(("drawn", "set"), told[1:]):
#     print(f"{how} in the scope: the same weights on both workers: {len(set(sums)) == 1}")

# %% [markdown]
# A variable's first value is the chief's, everywhere. What is assigned later is each worker's own affair, and no error tells.
#
# ## All together: the chief alone prints, and saves after each epoch


# %%
def main(args: argparse.Namespace) -> None:
    world = (
        tf_config.find()
    )  # TF_CONFIG's, if somebody has written it; else torchrun's, srun's or mpirun's
    with tf_config.company(world):  # a worker that is gone is one sentence on the others
        train(args, world)


def train(args: argparse.Namespace, world: launch.World) -> None:
    strategy, device = set_up(args, world)
    replicas, chief = strategy.num_replicas_in_sync, world.rank == 0
    say = print if chief else lambda *_, **__: None  # one voice
    with rendezvous.fail_together(world):  # all workers leave this block, or none
        args.batch_size, piece = flags.split(args.batch_size, replicas, who="replica")
        if chief:
            files.writable_folder(args.out)
        if world.local_rank == 0:
            data.fetch(args.data)  # one worker a node fetches …
    with rendezvous.fail_together(world):
        learn, test = data.load(data.fetch(args.data))  # … and the others find it there
    same = {"--batch-size": args.batch_size, "--seed": args.seed, "--lr": args.lr}
    same["--data (its checksum)"] = data.checksum(learn)
    for flag, value in {**same, "--epochs": args.epochs, "--resume": args.resume}.items():
        rendezvous.same_everywhere(world, flag, value)
    like = tuple(learn[0][0].shape), data.classes(learn, test), args.seed
    with strategy.scope():
        model, optimizer = tf_common.cnn(*like), tf.keras.optimizers.SGD(args.lr, momentum=0.9)
        optimizer.build(model.trainable_variables)
    parts = {
        "model": checkpoint.Variables(model.variables),
        "optimizer": checkpoint.Variables(optimizer.variables),
    }
    last = checkpoint.Checkpoint(
        args.out / "last.pt", parts, same, world
    )  # the chief reads and writes the file
    at = last.load(args.resume) or {"epoch": 0, "step": 0, "history": []}
    say(tf_config.describe(world, replicas, device.type == "cuda"))
    say(f"global batch {args.batch_size} = {replicas} (replicas) × {piece} (images)\n")
    say(metrics.opening(at, args, last.loaded, world), flush=True)
    args.epochs = max(args.epochs, at["epoch"])
    learned, tested = (
        tf_common.tensors(learn),
        tf_common.tensors(test),
    )  # not copied into each data set's graph
    step, count = train_step(strategy, model, optimizer), test_step(strategy, model)
    for epoch in range(at["epoch"], args.epochs):
        began, total = time.perf_counter(), 0.0
        order = tf_common.order(len(learn), epoch, args.seed)
        for number, batch in enumerate(deal(strategy, *learned, order, args.batch_size)):
            total += float(step(*batch)) * min(
                args.batch_size, len(learn) - number * args.batch_size
            )
        speed, loss = (
            len(learn) / (time.perf_counter() - began),
            metrics.finite(total / len(learn), epoch, world),
        )
        right = sum(
            float(count(*batch))
            for batch in deal(strategy, *tested, np.arange(len(test)), 256 * replicas)
        )
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": right / len(test),
            "images_per_s": speed,
        }
        say(metrics.row(row), flush=True)
        at = {**at, "epoch": epoch + 1, "history": [*at["history"], row]}
        last.save(at)
    what = (
        f"MultiWorkerMirroredStrategy with {pluralize(replicas, 'replica')} equals one device"
    )
    with (
        tf_config.patient(),
        rendezvous.fail_together(world),
    ):  # the others wait: a worker that leaves early counts as dead
        prove = chief and args.prove
        verdict = (
            tf_common.against_serial(what, model, tf_common.cnn(*like), learn, args)
            if prove
            else None
        )
    if chief:
        metrics.report(
            args.out,
            world,
            device,
            at["history"],
            verdict,
            devices=replicas,
            batch_size=args.batch_size,
        )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# Two workers, three epochs; then both start again and go on. On a cluster: `sbatch slurm/TF_CNN_MultiNode.slurm`.

# %% tags=["active-ipynb"]
# !python ../scripts/TF_CNN_MultiNode.py --spawn 2 --epochs 3 --out results/08
# !python ../scripts/TF_CNN_MultiNode.py --spawn 2 --resume --prove --out results/08

# %% [markdown]
# **By hand**, as on two machines without a launcher: one command each, and `TF_CONFIG` differs in the index alone.

# %% tags=["active-ipynb"]
# cluster = '"cluster": {"worker": ["127.0.0.1:12763", "127.0.0.1:12764"]}'
# worker = ["TF_CONFIG='{%s, \"task\": {\"type\": \"worker\", \"index\": %d}}'" % (cluster, index) for index in (0, 1)]
# command = "python ../scripts/TF_CNN_MultiNode.py --epochs 1 --out results/08-by-hand"
# !{worker[1]} {command} & {worker[0]} {command} && wait

# %% tags=["active-ipynb"]
# print(metrics.line("08 TensorFlow, two workers", "results/08"))
