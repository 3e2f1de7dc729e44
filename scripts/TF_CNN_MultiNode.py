# %% [markdown]
# # 08 · TensorFlow on several nodes: MultiWorkerMirroredStrategy
# **The question.** A TensorFlow program trains on one machine. I have two. What must change,
# and do two machines learn the same as one?
#
# You need neither GPU nor cluster: two processes on this machine take the place of two
# machines. A strategy, its scope, a replica and `strategy.run` are [lesson
# 07's](TF_CNN_MultiGPU.ipynb); rank, collective and all-reduce are in the
# [glossary](../lessons/README.md#all-reduce). The first cell starts TensorFlow, which takes
# about ten seconds.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice

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


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "TF_CNN_MultiNode",
        "Train a CNN with MultiWorkerMirroredStrategy: one process per worker.",
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


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import difflib
# import textwrap
# from functools import partial
# from pathlib import Path
#
# from multigpu import lesson, plots
#
# lesson.setup("08-tf-multi-node")
# tf.config.set_visible_devices([], "GPU")  # the kernel computes on the CPU, as the workers do
# from experiments import (
#     all_reduce_seconds,
#     batch_norm,
#     first_weights,
#     images_read,
#     on_worker,
#     steps_made,
#     try_fit,
# )
#
# folder = Path("../lessons/08-tf-multi-node")

# %% [markdown]
# ## A worker in 50 lines
# This program is plain TensorFlow, without the course's library. A **worker** is one process
# of the run, usually one for each machine; its strategy has a replica on each GPU of the
# machine, or one on the CPU. Worker 0 is the **chief**: it trains like the others, and it also
# prints and writes files.

# %% tags=["active-ipynb"]
# print((folder / "worker.py").read_text())

# %% [markdown]
# ## Predict first
# `one_machine.py` trains the same model on the same images, in batches of 120, on one device.
# You see it only as a diff, in the cell below, because it would give you the answer. Write
# your answer, then run the cell. The cell below compares it with what happens.

# %% tags=["active-ipynb", "guess"]
# # one_machine.py already has the loss / 120 and optimizer.build. How many lines of worker.py
# # are new or changed, without comments, blank lines, and lines that are only indented?
# guess_lines = 30

# %% tags=["active-ipynb"]
# lesson.need(guess_lines)
#
#
# def code(name):
#     """The program's lines, without docstring, comments, blank lines and indentation."""
#     _, _, program = (folder / name).read_text().split('"""', 2)
#     lines = (line.strip() for line in program.splitlines())
#     return [line for line in lines if line and not line.startswith("#")]
#
#
# names = ("one_machine.py", "worker.py")
# difference = difflib.unified_diff(*map(code, names), *names, n=0, lineterm="")
# changes = [line for line in difference if not line.startswith("@@")]
# print(*changes, sep="\n")
# added = sum(line.startswith("+") for line in changes) - 1  # without the line +++
# lesson.compare("new or changed lines", guess_lines, added, digits=0)

# %% [markdown]
# - `MultiWorkerMirroredStrategy` reads the variable `TF_CONFIG` and waits until all workers
#   have connected. It must be made before TensorFlow's first operation. Between CPUs, the
#   workers send data by gRPC, a network protocol; between GPUs, by
#   [NCCL](../lessons/README.md#nccl).
# - `experimental_distribute_dataset` gives each worker its
#   [shard](../lessons/README.md#shard) of each batch of 120.
# - In the scope, each replica gets a copy of every variable.
# - `strategy.run` calls `step` on each replica of this worker. In it, `optimizer.apply` *adds
#   up* the gradients of all replicas of all workers, by an all-reduce, before it updates the
#   weights. So the loss is the sum over the replica's images, divided by the *global* batch:
#   the sum of these losses is the mean over all 120.
# - Only the chief evaluates, prints and saves.
#
# `TF_CONFIG` has two parts. The [**cluster spec**](../lessons/README.md#cluster-spec) has the
# workers' addresses, the same list for all workers. The **task** says which of them this
# process is: only its `index` differs.

# %% tags=["active-ipynb"]
# addresses = ["127.0.0.1:12763", "127.0.0.1:12764"]
# configs = [tf_config.write(addresses, index) for index in (0, 1)]
# print("TF_CONFIG of worker 1:", configs[1].replace(', "task"', ',\n  "task"'), sep="\n")

# %% [markdown]
# Do one machine and two workers end with the same weights?

# %% tags=["active-ipynb", "guess"]
# guess_equal = "no"  # the same weights after 10 epochs, within 1e-6? "yes" or "no"

# %% [markdown]
# One machine, then two workers, each of which starts TensorFlow, in about ten seconds. (On two
# machines you would type one of the two commands on each. Here all compute on the CPU, because
# two workers on one machine would both take all its GPUs.)

# %% tags=["active-ipynb"]
# lesson.need(guess_equal, choices=("yes", "no"))
# !mkdir -p results
# %run {folder}/one_machine.py results/one_machine.npz
# program = f"CUDA_VISIBLE_DEVICES= python {folder}/worker.py results/worker.npz"
# worker_0, worker_1 = (f"TF_CONFIG='{config}' {program}" for config in configs)
# !{worker_1} & {worker_0} && wait
# one, several = np.load("results/one_machine.npz"), np.load("results/worker.npz")
# difference = max(np.abs(one[name] - several[name]).max() for name in one)
# equal = "yes" if difference < 1e-6 else "no"
# lesson.compare("the same weights within 1e-6", guess_equal, equal)

# %% [markdown]
# ## What the 50 lines lack
# `worker.py` is right because 1,440 images are 12 full batches, the model is simple, and no
# worker fails. A real program meets more. One question at a time:
#
# **Who reads which image?** [Auto-sharding](../lessons/README.md#auto-sharding) divides the
# data set among the workers. A policy says how: `FILE` gives each worker whole files, `DATA` a
# part of each batch; with `AUTO`, the default, TensorFlow chooses; `OFF` turns it off. The
# cell after your guess starts two workers, which takes about half a minute. They run all
# experiments of this part at once, functions of
# [experiments.py](../lessons/08-tf-multi-node/experiments.py):
#
# | Name | What it has | Used in |
# |---|---|---|
# | `read` | the images that a worker reads in each step, for each policy | these cells |
# | `uneven` | its images in each step, if workers have unequal numbers | "Uneven batches" |
# | `weights` | its first weights | "The same first weights" |
# | `fits` | what `fit` does | "Keras's `fit`" |
# | `norms` | its model with BatchNorm | "BatchNorm" |
# | `costs` | the time of an all-reduce | "What does the all-reduce cost?" |

# %% tags=["active-ipynb", "guess"]
# # 8 images in global batches of 4, two workers, sharding is off:
# guess_off = 2  # how many steps does an epoch have?

# %% tags=["active-ipynb"]
# lesson.need(guess_off)
# experiments = (
#     images_read,
#     steps_made,
#     first_weights,
#     try_fit,
#     batch_norm,
#     all_reduce_seconds,
# )
# found = launch.call(on_worker, 2, *experiments)
# read, uneven, weights, fits, norms, costs = zip(*found)
# first, second = read  # of worker 0 and of worker 1
# for policy in ("AUTO", "AUTO, files", "DATA", "FILE", "OFF"):
#     print(f"{policy}: worker 0 reads {first[policy]}, worker 1 {second[policy]}")
# lesson.compare("steps of an epoch, OFF", guess_off, len(first["OFF"]), digits=0)

# %% [markdown]
# - With `AUTO` and an array, as with `DATA`, the workers read different halves of a batch.
# - With `FILE` each worker reads whole files: here the images are in two files, the first with
#   0 to 3. If the data set reads files, `AUTO` does the same.
# - With `OFF` each worker reads all images, and an epoch has twice as many steps.
#
# Now each worker shuffles the data set before it is divided, with a seed of its own. The
# policy is `AUTO`.

# %% tags=["active-ipynb", "guess"]
# guess_missed = 0  # how many of the 8 images does neither worker read?

# %% tags=["active-ipynb"]
# lesson.need(guess_missed)
# rows = {name: [sum(own[name], []) for own in read] for name in ("AUTO", "FILE")}
# for name in ("OFF", "AUTO, two seeds"):
#     rows[f"{name}, worker 0"] = [sum(first[name], []), []]
#     rows[f"{name}, worker 1"] = [[], sum(second[name], [])]
# images = sum(first["AUTO, two seeds"] + second["AUTO, two seeds"], [])
# missed = 8 - len(set(images))
# lesson.compare("images that no worker reads", guess_missed, missed, digits=0)
# title = "With two seeds some images are read twice, others never"
# fig = plots.shards(list(rows.values()), title, list(rows), images_per_step=2)
# fig.axes[0].set_xlabel("image (large: the worker that reads it; small: in which step)")
# fig

# %% [markdown]
# **Both workers read some images, here 3 and 4, and neither reads others**, here 2 and 5.
# There is no error.
#
# **Uneven batches.** The 1,437 training images of this course make a last batch of 29. So this
# script divides the data itself: each worker makes a data set of its replicas' shards of each
# global batch. The last batch is padded, so that each replica gets images. An image's
# *sample weight* is 1 / (images in this batch), and 0 if it is padding. An epoch of ten images
# in batches of 8, on two workers with two replicas each:
#
# ![Ten images in two batches, on four replicas](../lessons/08-tf-multi-node/distribute.png)


# %%
def distribute(
    strategy: tf.distribute.Strategy,
    images: tf.Tensor,
    labels: tf.Tensor,
    order: np.ndarray,
    batch_size: int,
) -> Iterator[tuple]:
    """One pass over the images in this order, as (images, labels, sample weights).

    Each replica gets its shard of each global batch of `batch_size` images.
    """
    steps = -(-len(order) // batch_size)
    shard_size = batch_size // strategy.num_replicas_in_sync
    place = np.arange(steps * batch_size)
    numbers = np.resize(order, len(place))  # padded from the beginning
    images_in_batch = np.minimum(batch_size, len(order) - place // batch_size * batch_size)
    sample_weights = (place < len(order)) / images_in_batch

    def gather(
        numbers: tf.Tensor, sample_weights: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return tf.gather(images, numbers), tf.gather(labels, numbers), sample_weights

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        def shards(array: np.ndarray) -> np.ndarray:
            by_worker = array.reshape(steps, context.num_input_pipelines, -1, shard_size)
            return by_worker[:, context.input_pipeline_id].reshape(-1, shard_size)

        own = (shards(numbers), shards(sample_weights).astype(np.float32))
        # Endless: if it ended, the workers would ask each other before each batch whether any
        # of them still has one, which takes longer than the step.
        return tf.data.Dataset.from_tensor_slices(own).map(gather).repeat().prefetch(2)

    return islice(strategy.distribute_datasets_from_function(of_worker), steps)


# %% [markdown]
# The picture's ten images, on one replica, so that a line is a row of the picture:

# %% tags=["active-ipynb"]
# ten = tf.range(10)  # each image is only its number
# one_replica = tf.distribute.get_strategy()
# for images, _, sample_weights in distribute(one_replica, ten, ten, np.arange(10), 8):
#     print("images", *images.numpy(), "sample weights", *sample_weights.numpy())

# %% [markdown]
# What if one worker has fewer images? Here workers 0 and 1 have 100 and 44, in batches of 10,
# and use `distribute_datasets_from_function` as above, but without `repeat`. So worker 0 has
# ten batches, and worker 1 has five.

# %% tags=["active-ipynb", "guess"]
# guess_steps = 5  # how many steps does worker 1 make?

# %% tags=["active-ipynb"]
# lesson.need(guess_steps)
# for number, images in enumerate(uneven):
#     print(f"worker {number}: images in each step {images}")
# lesson.compare("steps of worker 1", guess_steps, len(uneven[1]), digits=0)

# %% [markdown]
# Worker 1 makes as many steps as worker 0; the last ones are without images. This is the
# distributed data set's work. If each worker calls `strategy.run` with its own tensors, the
# one with more steps waits in the all-reduce until the other makes that step, too.
#
# A replica's loss is the sum of loss × sample weight over its shard. The sum over all replicas
# is the mean over the global batch, also of an uneven one.


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

    def replica_step(
        images: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor
    ) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = cross_entropy(labels, logits, from_logits=True)
            loss = tf.reduce_sum(losses * sample_weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        # Adds the gradients up over all replicas, then updates.
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return summed(strategy, replica_step)


def test_step(
    strategy: tf.distribute.Strategy, model: tf.keras.Model
) -> Callable[..., tf.Tensor]:
    """A function that returns the number of hits in a global batch."""

    def replica_step(
        images: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor
    ) -> tf.Tensor:
        right = tf.argmax(model(images, training=False), axis=1) == labels
        return tf.reduce_sum(tf.cast(right & (sample_weights > 0), tf.float32))

    return summed(strategy, replica_step)


# %% [markdown]
# **The same first weights.** Each worker draws the weights of a model in the scope, with a
# seed of its own.

# %% tags=["active-ipynb", "guess"]
# guess_drawn = "no"  # drawn with two seeds: the same weights on both workers? "yes", "no"

# %% tags=["active-ipynb"]
# lesson.need(guess_drawn, choices=("yes", "no"))
# first, second = weights
# same = "yes" if (first["drawn"] == second["drawn"]).all() else "no"
# lesson.compare("drawn with two seeds, the same weights", guess_drawn, same)

# %% [markdown]
# When a variable is made in the scope, its first value is sent from the chief to all workers.
#
# In a second model, `set_weights` assigns weights that each worker drew with NumPy, with a
# seed of its own.

# %% tags=["active-ipynb", "guess"]
# guess_assigned = "yes"  # assigned by set_weights: the same on both workers? "yes", "no"

# %% tags=["active-ipynb"]
# lesson.need(guess_assigned, choices=("yes", "no"))
# same = "yes" if (first["assigned"] == second["assigned"]).all() else "no"
# lesson.compare("assigned with two seeds, the same weights", guess_assigned, same)

# %% [markdown]
# What `set_weights` assigns stays on the worker, and no error reports the difference. So
# all workers must assign the same. The script compares the seeds, and stops if they differ.
#
# **Keras's `fit`** would need no loop. The two workers called it, too.

# %% tags=["active-ipynb", "guess"]
# guess_fit = "yes"  # can Keras's fit train on two workers? "yes" or "no"

# %% tags=["active-ipynb"]
# lesson.need(guess_fit, choices=("yes", "no"))
# message, _ = fits
# text = f"TensorFlow {tf.__version__}, Keras {tf.keras.__version__}: {message or 'it trains'}"
# print(textwrap.fill(text, 95))
# lesson.compare("Keras's fit trains", guess_fit, "no" if message else "yes")

# %% [markdown]
# So with these versions `fit` does not train on several workers, and the script has its own
# loop. With MirroredStrategy (lesson 07) `fit` works.
#
# **BatchNorm** normalises by the mean and the variance of the images that a replica sees. For
# the evaluation it keeps a moving mean and a moving variance. In this experiment worker 0
# reads the digits 0 to 4 and worker 1 the digits 5 to 9, as if each machine had its own files.
# BatchNorm is the first layer, so its moving mean is an image. One device trains on all
# digits, for comparison.

# %% tags=["active-ipynb", "guess"]
# guess_copies = "yes"  # both workers' copies have the same test accuracy? "yes" or "no"

# %% tags=["active-ipynb"]
# lesson.need(guess_copies, choices=("yes", "no"))
# # On one device, synchronized statistics are the same as the others.
# [[one_device]] = on_worker(partial(batch_norm, kinds=[False]))
# (chief, synced_chief), (worker, _) = norms
# equal = (chief["weights"] == worker["weights"]).all()
# apart = np.abs(chief["moving mean"] - worker["moving mean"]).max()
# print(f"the workers' weights are equal: {equal}; their moving means are {apart:.2f} apart")
# print("test accuracy, with three seeds:")
# copies = {"chief's copy": chief, "worker 1's copy": worker, "one device": one_device}
# for name, found in copies.items():
#     low, *_, high = sorted(found["accuracies"])
#     print(f"    {name}: {low:.2f} to {high:.2f}")
# equal = "yes" if chief["accuracies"] == worker["accuracies"] else "no"
# lesson.compare("the copies have the same test accuracy", guess_copies, equal)

# %% [markdown]
# The optimizer updates the weights, so these are the same on all workers. It does not update
# the moving mean and variance: each worker has those of its own images. **It is enough to save
# the chief's copy only if the model has no such state.** And in training each replica
# normalises by its own images, so the weights are not those of one device either.
#
# `BatchNormalization(synchronized=True)` adds up the statistics of all replicas in each step.
# The workers have also trained with it:

# %% tags=["active-ipynb"]
# kinds = ("BatchNormalization()", "synchronized=True")
# for kind, found in zip(kinds, norms[0]):
#     names = ("weights", "moving mean")
#     apart = [np.abs(found[name] - one_device[name]).max() for name in names]
#     text = "{}: chief against one device: weights {:.4f}, moving mean {:.4f} apart"
#     print(text.format(kind, *apart))
# same = synced_chief["accuracies"] == one_device["accuracies"]
# print("synchronized: the chief's test accuracies are one device's:", same)
#
# means = {
#     "chief": chief,
#     "worker 1": worker,
#     "chief,\nsynchronized": synced_chief,
#     "one device": one_device,
# }
# fig = plots.figure(8, 3)
# for place, (name, found) in enumerate(means.items()):
#     axes = fig.add_subplot(1, 4, place + 1)
#     axes.imshow(found["moving mean"].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
#     axes.set(xticks=[], yticks=[], xlabel=name)
#     axes.spines[:].set_visible(False)
# fig.suptitle("The moving mean of a worker's own digits, or of all digits if synchronized")
# fig

# %% [markdown]
# With `synchronized=True` the chief's copy has the weights and the moving mean of one device,
# to the four decimals that are printed. The model of this course has no BatchNorm, so the
# script saves the chief's copy.
#
# ## On a cluster
# A launcher (torchrun, srun, mpirun) starts the workers and says which one each is, but it
# does not write the list of addresses. TensorFlow's `SlurmClusterResolver` makes the list from
# Slurm's variables. Here Slurm runs rank 0 on the node `n2` and rank 1 on `n10`.

# %% tags=["active-ipynb", "guess"]
# guess_address = "n2"  # the node in the first address of the resolver's list: "n2" or "n10"?

# %% tags=["active-ipynb"]
# lesson.need(guess_address, choices=("n2", "n10"))
# step = {
#     "SLURM_PROCID": "0",
#     "SLURM_STEP_NODELIST": "n[2,10]",
#     "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
#     "SLURM_STEP_NUM_TASKS": "2",
# }
# os.environ.update(step)
# resolver = tf.distribute.cluster_resolver.SlurmClusterResolver
# cluster = resolver(gpus_per_node=2, auto_set_gpu=False).cluster_spec().as_dict()
# for name in step:
#     del os.environ[name]
# print(cluster)
# node, port = cluster["worker"][0].split(":")
# lesson.compare("rank 0's address", guess_address, node, choices=("n2", "n10"))

# %% [markdown]
# The resolver sorts the nodes as text, so rank 0, which is on `n2`, gets the address of `n10`.
# The port is the same for every job. So the script makes the list itself: the workers meet at
# rank 0, as in lesson 05, and exchange addresses with free ports. They also form a gloo
# process group, which reports who has joined and who has failed; TensorFlow sends the
# gradients. (In question 2 of the exercise you write the list in a few lines of Python.)
#
# Meeting first has a second use. If a worker never joins, TensorFlow waits for an hour without
# a message, and neither Ctrl-C nor SIGTERM ends it. `connect_workers` names the missing
# worker, and `deadline` ends this process if TensorFlow does not connect.


# %%
def set_up(
    args: argparse.Namespace, world: launch.World
) -> tuple[tf.distribute.Strategy, torch.device]:
    """The strategy over all workers, and this worker's type of device as torch names it."""
    gpus = tf_common.gpus(already_reported=world.local_rank != 0)
    own = tf_config.gpus_of_worker(world, len(gpus))

    # Addresses such as ["10.0.0.1:41763", "10.0.0.2:38233"].
    addresses = tf_config.connect_workers(world, gpus=len(own))
    os.environ["TF_CONFIG"] = tf_config.write(addresses, world.rank)

    tf.config.set_visible_devices([gpus[number] for number in own], "GPU")
    cores = len(os.sched_getaffinity(0)) // world.local_size
    tf.config.threading.set_intra_op_parallelism_threads(max(1, cores))
    tf.config.experimental.enable_tensor_float_32_execution(not args.prove)

    # The strategy takes all GPUs that it sees, or the CPU as one device. If a worker dies
    # while TensorFlow connects them, only this deadline ends the others.
    with tf_config.deadline():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return strategy, torch.device("cuda" if own else "cpu")


# %% [markdown]
# ## All together
# The script on two machines with two GPUs each. On CPUs each worker has one replica:
#
# ![Two workers with two replicas each](../lessons/08-tf-multi-node/two-workers.png)
#
# `train` has two parts that one machine does not need:
# - `rendezvous.fail_together`: if a worker finds an error in its flags, files or data in this
#   block, all workers end. Otherwise the others would wait for it.
# - `rendezvous.same_everywhere` stops the run if a flag differs between workers.
#
# To train your own model, edit `train` in `scripts/TF_CNN_MultiNode.py`. This notebook has the
# same text, but the workers run the file, never a cell.


# %% jupyter={"source_hidden": true}
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

    # An error on one worker ends all of them. One worker on each node downloads the
    # data; afterwards the others find it there.
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

    # Only the chief reads and writes the file. It is enough to save its copy, because the
    # model has no BatchNorm.
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
        losses = [step(*shards) for shards in batches]
        # Only now: float() waits until the device has computed the number.
        total = sum(
            float(loss) * batch.images_in_step(number, len(train_set))
            for number, loss in enumerate(losses)
        )
        images_per_s = len(train_set) / (time.perf_counter() - began)
        loss = metrics.check_loss(total / len(train_set), epoch, world)

        test_batches = distribute(strategy, *test_images, in_order, 256 * replicas)
        counts = [count(*shards) for shards in test_batches]
        hits = sum(float(one) for one in counts)
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


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# torchrun starts two workers on this machine, in about 20 seconds. The proof compares the
# weights with those of one device. If a worker dies, the others end, and `--resume` continues
# after the last whole epoch: exercise 5 on the page.

# %% tags=["active-ipynb"]
# torchrun = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
# program = "../scripts/TF_CNN_MultiNode.py --prove --out results/08"
# !OMP_NUM_THREADS=1 {torchrun} {program}

# %% [markdown]
# ## What does the all-reduce cost?
# In an all-reduce of *b* bytes over *n* workers, each worker sends 2 (*n* − 1)/*n* · *b* bytes
# (lesson 10 counts them): with two workers, *b*. A gradient in float32 has 4 bytes.
#
# An example: ResNet-50 has 25.6 million weights. By lesson 13's prediction, an A100 computes a
# step of 64 images in 81 ms
# (`multigpu scaling --model resnet50 --gpu A100-80GB --link NVLink3 --gpus 1`). Two machines
# with one A100 each are joined by a network of 10 Gbit/s. Each computes 64 images in a step,
# so the global batch is 128. The all-reduce begins when the computing ends.

# %% tags=["active-ipynb", "guess"]
# guess_share = 10  # % of a step that is the all-reduce, with 10 Gbit/s between the machines

# %% tags=["active-ipynb"]
# lesson.need(guess_share)
# computing = 0.081  # seconds
# workers = 2
# sent = 2 * (workers - 1) / workers * 4 * 25.6e6  # bytes
#
# shares = {}
# for gigabits in (1, 10, 25, 200):
#     all_reduce = sent / (gigabits * 1e9 / 8)
#     shares[gigabits] = 100 * all_reduce / (computing + all_reduce)
#     part = f"{1e3 * all_reduce:.0f} ms, {shares[gigabits]:.0f}% of a step"
#     print(f"{gigabits} Gbit/s: the all-reduce takes {part}")
# lesson.compare("share of a step", guess_share, shares[10], unit="%", digits=0)

# %% [markdown]
# With 10 Gbit/s, half of a step is communication: two machines make a step of twice as many
# images in twice the time, so together they are as fast as one. With 1 Gbit/s they are slower
# than one. This is the worst case, because an all-reduce that runs during backward is partly
# hidden, as with DDP in lesson 05. The latency is left out.
#
# The digits' CNN has 153 kB of gradients. Two workers on this machine have measured an
# all-reduce of one number, of as many numbers as the CNN has, and of more:

# %% tags=["active-ipynb", "nbval-ignore-output"]
# seconds, _ = costs
# for numbers, took in seconds.items():
#     low, middle, high = 1e3 * np.quantile(took, (0, 0.5, 1))
#     print(f"{4 * numbers:,} bytes: {middle:.1f} ms, {low:.1f} to {high:.1f}")
#
# epochs = metrics.finished_run("results/08")["epochs"]
# step = 64 / np.median([epoch["images_per_s"] for epoch in epochs])  # seconds
# share = f"{np.median(seconds[38_282]) / step:.0%} of a step of the script"
# print(f"that of the CNN is {share}, which takes {1e3 * step:.0f} ms")

# %% [markdown]
# The all-reduce of one number sends almost nothing: its time is the latency, and a small
# message costs little more. More images in a step make the share smaller: the bytes stay the
# same. Both processes share one CPU here, so this says nothing about two machines.
#
# **What must change for two machines?**
# 1. One strategy, made before TensorFlow's first operation, and `TF_CONFIG` for each worker.
# 2. Each worker reads its own shard, and all workers shuffle with the same seed.
# 3. The loss is divided by the global batch.
# 4. Only the chief prints and writes. BatchNorm needs `synchronized=True`.
# 5. If a worker dies, the others must end: here TensorFlow or the gloo process group reports
#    it to them, and the launcher ends those that still run.
#
# **Do two machines learn the same as one?** Yes, except for rounding, if 2 and 3 hold, all
# workers begin with the same weights, and the model has no BatchNorm without
# `synchronized=True`.
#
# **Are they faster?** If the all-reduce is short against the computing: predict its time from
# the bytes of the gradients and the bandwidth, before you ask for the second machine.
#
# The page of this lesson has the commands for a cluster and for GPUs.

# %% tags=["active-ipynb"]
# # for the table of all routes
# print(metrics.route_row("08 TensorFlow, two workers", "results/08"))

# %% [markdown] tags=["footer"]
# [← 07 MirroredStrategy by hand](TF_CNN_CustomLoop.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/08-tf-multi-node/README.md) ·
# [09 The Lightning-style wrapper →](PTL_multiGPU.ipynb)
