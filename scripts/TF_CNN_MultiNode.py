# %% [markdown]
# # 08 · TensorFlow on several nodes: MultiWorkerMirroredStrategy
# **The question.** The TensorFlow script of lesson 07 fills one node. I have two. How do the
# processes find each other, who reads which image, who writes the checkpoint, and what happens
# if one process dies?
#
# **Predict first.** (1) Two workers read the same 8 images, in batches of 4: which images does
# each get, if TensorFlow shards? (2) Each worker makes the model with a seed of its own: do
# they start with the same weights? (3) A worker is killed: what do the others do?

# %%
import argparse
import json
import os
import time
from collections.abc import Callable

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
        help="continue from FILE, or from OUT/last.pt if there is one",
    )
    parser.add_argument(
        "--spawn",
        metavar="N",
        help="start N workers on this machine",
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · Set up the workers
# One variable, `TF_CONFIG`, holds the addresses of all workers and the number of this one.
# Worker 0 is the **chief**. TensorFlow waits an hour for a worker that never joins, and
# ignores signals meanwhile. So `tf_config.connect_workers` connects them first, as lesson 05
# does, and names a worker that is missing. It forms a gloo group, which carries messages; the
# gradients travel through TensorFlow.


# %%
def set_up(
    args: argparse.Namespace, world: launch.World
) -> tuple[tf.distribute.Strategy, torch.device]:
    """The strategy over all workers, and this worker's type of device as torch names it."""
    gpus = tf_common.gpus(already_reported=world.local_rank != 0)
    own = tf_config.gpus_of_worker(world, len(gpus))

    # Addresses such as ["10.0.0.1:41763", "10.0.0.2:38233"].
    workers = tf_config.connect_workers(world, gpus=len(own))
    task = {"type": "worker", "index": world.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

    tf.config.set_visible_devices([gpus[number] for number in own], "GPU")
    cores = len(os.sched_getaffinity(0)) // world.local_size
    tf.config.threading.set_intra_op_parallelism_threads(max(1, cores))
    tf.config.experimental.enable_tensor_float_32_execution(not args.prove)

    # The strategy takes all GPUs that it sees, or the CPU as one device. If a worker dies
    # while TensorFlow connects them, only this deadline ends the others.
    with tf_config.deadline():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return strategy, torch.device("cuda" if own else "cpu")


# %% tags=["active-ipynb"]
# def automatic():
#     """The images that this worker reads in an epoch. launch.call runs it in each process."""
#     strategy, _ = set_up(parse([]), tf_config.find_world())
#     policies = tf.data.experimental.AutoShardPolicy
#     read = {}
#     for policy in (policies.AUTO, policies.DATA, policies.OFF):
#         options = tf.data.Options()
#         options.experimental_distribute.auto_shard_policy = policy
#         images = tf.data.Dataset.from_tensor_slices(range(8)).batch(4).with_options(options)
#         read[policy.name] = []
#         for batch in strategy.experimental_distribute_dataset(images):
#             shard = strategy.experimental_local_results(batch)[0]
#             read[policy.name].append(shard.numpy().tolist())
#     return read
#
#
# first, second = launch.call(automatic, 2)
# for policy in first:
#     print(f"{policy}: worker 0 reads {first[policy]}, worker 1 {second[policy]}")

# %% [markdown]
# (1) `AUTO` is `DATA` here: half of each batch. With `OFF` each worker reads all images, and
# each image counts twice in an epoch.
#
# **On Slurm**, `SlurmClusterResolver` writes the list for you. With these nodes, Slurm starts
# rank 0 on `n2`:

# %% tags=["active-ipynb"]
# step = {
#     "SLURM_PROCID": "0",
#     "SLURM_STEP_NODELIST": "n[2,10]",
#     "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
#     "SLURM_STEP_NUM_TASKS": "2",
# }
# os.environ.update(step)
# resolver = tf.distribute.cluster_resolver.SlurmClusterResolver
# print(resolver(gpus_per_node=2, auto_set_gpu=False).cluster_spec())
# for name in [name for name in os.environ if name.startswith("SLURM_")]:
#     del os.environ[name]

# %% [markdown]
# The resolver sorts the nodes as text, so it gives rank 0, which is on `n2`, the address of
# `n10`. The port is the same for every job, and on nodes without GPUs the resolver fails with
# a ValueError. So this lesson writes the list itself.
#
# ## Step 2 · Read in the data
# Without automatic sharding: each worker makes its own data set, which holds its replicas'
# shards of each global batch. A **weight** is 1 / (images in this batch). The last batch is
# padded with images of weight 0, so that every replica gets some.


# %%
def distribute(
    strategy: tf.distribute.Strategy,
    images: tf.Tensor,
    labels: tf.Tensor,
    order: np.ndarray,
    batch_size: int,
) -> tf.distribute.DistributedDataset:
    """One pass over the images in this order, as (images, labels, weights).

    Each replica gets its shard of each global batch of `batch_size` images.
    """
    steps = -(-len(order) // batch_size)
    shard_size = batch_size // strategy.num_replicas_in_sync
    place = np.arange(steps * batch_size)
    numbers = np.resize(order, len(place))  # padded from the beginning
    images_in_batch = np.minimum(batch_size, len(order) - place // batch_size * batch_size)
    weights = (place < len(order)) / images_in_batch

    def gather(
        numbers: tf.Tensor, weights: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return tf.gather(images, numbers), tf.gather(labels, numbers), weights

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        def shards(array: np.ndarray) -> np.ndarray:
            by_worker = array.reshape(steps, context.num_input_pipelines, -1, shard_size)
            return by_worker[:, context.input_pipeline_id].reshape(-1, shard_size)

        own = (shards(numbers), shards(weights).astype(np.float32))
        return tf.data.Dataset.from_tensor_slices(own).map(gather).prefetch(2)

    return strategy.distribute_datasets_from_function(of_worker)


# %% [markdown]
# ## Step 3 · Train and evaluate
# The strategy **adds up** the replicas' gradients. So a replica's loss is the sum of loss ×
# weight over its shard: the sum of these sums is the mean over the global batch.


# %%
def summed(
    strategy: tf.distribute.Strategy, replica_step: Callable[..., tf.Tensor]
) -> Callable[..., tf.Tensor]:
    """A function that runs `replica_step` on each replica's shard and adds up the results."""

    @tf.function
    def step(*shards: tf.Tensor) -> tf.Tensor:
        results = strategy.run(replica_step, args=shards)
        return strategy.reduce("SUM", results, axis=None)

    return step


def train_step(
    strategy: tf.distribute.Strategy,
    model: tf.keras.Model,
    optimizer: tf.keras.Optimizer,
) -> Callable[..., tf.Tensor]:
    """A function that trains on one global batch and returns its mean loss."""
    cross_entropy = tf.keras.losses.sparse_categorical_crossentropy

    def replica_step(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = cross_entropy(labels, logits, from_logits=True)
            loss = tf.reduce_sum(losses * weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        # Adds the gradients up over all replicas, then updates.
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return summed(strategy, replica_step)


def test_step(
    strategy: tf.distribute.Strategy, model: tf.keras.Model
) -> Callable[..., tf.Tensor]:
    """A function that returns the number of hits in a global batch."""

    def replica_step(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        right = tf.argmax(model(images, training=False), axis=1) == labels
        return tf.reduce_sum(tf.cast(right & (weights > 0), tf.float32))

    return summed(strategy, replica_step)


# %% [markdown]
# What does `fit` do here? And prediction (2): what are the weights of models made from two
# seeds?

# %% tags=["active-ipynb"]
# def two_seeds():
#     """What fit reports, and the sum of this worker's weights in two models.
#
#     One model draws its weights in the scope; the other one's are set there, by set_weights.
#     """
#     world = tf_config.find_world()
#     strategy, _ = set_up(parse([]), world)
#     with strategy.scope():
#         tf.keras.utils.set_random_seed(world.rank)
#         layers = [tf.keras.Input((64,)), tf.keras.layers.Dense(10)]
#         drawn = tf.keras.Sequential(layers)
#         drawn.compile("sgd", "mse")
#         assigned = tf_common.cnn(seed=world.rank)
#     try:
#         drawn.fit(np.zeros((4, 64)), np.zeros((4, 10)), batch_size=4, verbose=0)
#     except ValueError as error:
#         message = str(error).splitlines()[0]
#     sums = [sum(float(w.sum()) for w in model.get_weights()) for model in (drawn, assigned)]
#     return message, *sums
#
#
# messages, drawn, assigned = zip(*launch.call(two_seeds, 2))
# print(f"TensorFlow {tf.__version__}, Keras {tf.keras.__version__}, fit: {messages[0]} …")
# print("drawn in the scope: the same weights on both workers:", drawn[0] == drawn[1])
# print("set in the scope: the same weights on both workers:", assigned[0] == assigned[1])

# %% [markdown]
# A variable's first value is the chief's, on all workers. A value that is assigned later stays
# on its worker, and no error reports the difference.
#
# ## All together: only the chief prints, and it saves after each epoch


# %%
def main(args: argparse.Namespace) -> None:
    # From TF_CONFIG if it is set, else from torchrun's, srun's or mpirun's variables.
    world = tf_config.find_world()
    with tf_config.report_lost_worker(world):
        train(args, world)


def train(args: argparse.Namespace, world: launch.World) -> None:
    strategy, device = set_up(args, world)
    replicas = strategy.num_replicas_in_sync
    chief = world.rank == 0

    def print_on_chief(text: str) -> None:
        if chief:
            print(text, flush=True)

    # An error on one worker ends all of them. One worker a node downloads the data; afterwards
    # the others find it on the node.
    with rendezvous.fail_together(world):
        batch = flags.split_batch(args.batch_size, replicas, who="replica")
        if chief:
            files.writable_folder(args.out)
        if world.local_rank == 0:
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        train_set, test_set = data.load(data.fetch(args.data))

    settings = {
        "--batch-size": batch.global_size,
        "--seed": args.seed,
        "--lr": args.lr,
        "--data (its checksum)": data.checksum(train_set),
    }
    must_agree = {**settings, "--epochs": args.epochs, "--resume": args.resume}
    for flag, value in must_agree.items():
        rendezvous.same_everywhere(world, flag, value)

    shape = tuple(train_set[0][0].shape)
    classes = data.num_classes(train_set, test_set)
    with strategy.scope():
        model = tf_common.cnn(shape, classes, args.seed)
        optimizer = tf.keras.optimizers.SGD(args.lr, momentum=0.9)
        optimizer.build(model.trainable_variables)

    # Only the chief reads and writes the file.
    parts = {
        "model": checkpoint.Variables(model.variables),
        "optimizer": checkpoint.Variables(optimizer.variables),
    }
    last = checkpoint.Checkpoint(args.out / "last.pt", parts, settings, world)
    position = last.load(args.resume) or {"epoch": 0, "step": 0, "history": []}

    print_on_chief(tf_config.describe(world, replicas, device.type == "cuda"))
    shards = f"{replicas} (replicas) × {batch.per_micro_batch} (images)"
    print_on_chief(f"global batch {batch.global_size} = {shards}\n")
    print_on_chief(metrics.resume_header(position, args, last.loaded, world))

    # Made once: arrays would be copied into each data set's graph.
    train_images = tf_common.tensors(train_set)
    test_images = tf_common.tensors(test_set)
    in_order = np.arange(len(test_set))
    step = train_step(strategy, model, optimizer)
    count = test_step(strategy, model)

    for epoch in range(position["epoch"], args.epochs):
        began = time.perf_counter()
        order = tf_common.epoch_order(len(train_set), epoch, args.seed)
        batches = distribute(strategy, *train_images, order, batch.global_size)
        total = 0.0
        for number, shards in enumerate(batches):
            total += float(step(*shards)) * batch.images_in_step(number, len(train_set))
        images_per_s = len(train_set) / (time.perf_counter() - began)
        loss = metrics.check_loss(total / len(train_set), epoch, world)

        test_batches = distribute(strategy, *test_images, in_order, 256 * replicas)
        hits = sum(float(count(*shards)) for shards in test_batches)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": hits / len(test_set),
            "images_per_s": images_per_s,
        }
        print_on_chief(metrics.row(row))
        position = {**position, "epoch": epoch + 1, "history": [*position["history"], row]}
        last.save(position)

    # The other workers wait for the chief's proof: TensorFlow reports a worker that leaves
    # early as lost.
    verdict = None
    with tf_config.without_timeout(), rendezvous.fail_together(world):
        if chief and args.prove:
            verdict = tf_common.compare_with_serial(
                f"MultiWorker on {replicas} replicas equals one device",
                model,
                tf_common.cnn(shape, classes, args.seed),
                train_set,
                epochs=position["epoch"],
                batch_size=batch.global_size,
                lr=args.lr,
                seed=args.seed,
            )
    if chief:
        metrics.report(
            args.out,
            world,
            device,
            position["history"],
            verdict,
            devices=replicas,
            batch_size=batch.global_size,
        )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# Two workers, three epochs; then both start again and continue. On a cluster: `sbatch
# slurm/TF_CNN_MultiNode.slurm`.

# %% tags=["active-ipynb"]
# !python ../scripts/TF_CNN_MultiNode.py --spawn 2 --epochs 3 --out results/08
# !python ../scripts/TF_CNN_MultiNode.py --spawn 2 --resume --prove --out results/08

# %% [markdown]
# **By hand**, as on two machines without a launcher: one command each. `TF_CONFIG` differs in
# the index only.

# %% tags=["active-ipynb"]
# def tf_config_of(index):
#     addresses = ["127.0.0.1:12763", "127.0.0.1:12764"]
#     task = {"type": "worker", "index": index}
#     return json.dumps({"cluster": {"worker": addresses}, "task": task})
#
#
# command = "python ../scripts/TF_CNN_MultiNode.py --epochs 1 --out results/08-by-hand"
# worker_0 = f"TF_CONFIG='{tf_config_of(0)}' {command}"
# worker_1 = f"TF_CONFIG='{tf_config_of(1)}' {command}"
# !{worker_1} & {worker_0} && wait

# %% tags=["active-ipynb"]
# print(metrics.route_row("08 TensorFlow, two workers", "results/08"))

# %% [markdown] tags=["footer"]
# [← 07 MirroredStrategy by hand](TF_CNN_CustomLoop.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/08-tf-multi-node/README.md) ·
# [09 The Lightning-style wrapper →](PTL_multiGPU.ipynb)
