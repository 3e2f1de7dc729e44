"""TensorFlow with the same model, initial weights, data and batches as PyTorch's lessons.

The lessons import `tf` from this module, which turns off the messages that TensorFlow prints
at its start, and reports an error if TensorFlow is not installed. No other module of the
library imports this one, because only lessons 07 and 08 need TensorFlow.
"""

import os
import sys
from argparse import Namespace
from contextlib import suppress

import numpy as np
import torch
from torch.utils.data import TensorDataset

from multigpu import models, proof
from multigpu.devices import CLASSROOM
from multigpu.errors import UserError, pluralize
from multigpu.launch.world import integer

# TensorFlow reads these once, when it is imported. Level 2 keeps its error messages; level 0
# also shows why it finds no GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# oneDNN prints a notice at its start, and adds numbers in a different order on each CPU.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# Keras imports scikit-learn unless it is missing, for wrappers that no lesson uses. That takes
# a fifth of TensorFlow's start, so it is missing until TensorFlow has started.
sys.modules.setdefault("sklearn", None)
try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    missing = UserError(
        "TensorFlow is not installed; lessons 07 and 08 need it: "
        "pip install -c constraints.txt -e '.[tensorflow]' from the repository's root "
        "(with GPUs '.[tensorflow-gpu]')."
    )
    # A notebook shows the exception. A script cannot catch it, so print it there.
    if "IPython" in sys.modules:
        raise missing from None
    print(f"error: {missing}", file=sys.stderr)
    sys.exit(2)
finally:
    if sys.modules["sklearn"] is None:
        del sys.modules["sklearn"]

tf.get_logger().setLevel("WARNING")  # in a notebook it would log every all-reduce


def gpus(already_reported: bool = False) -> list["tf.config.PhysicalDevice"]:
    """Return the GPUs that TensorFlow sees; from now on it allocates memory only when needed.

    By default TensorFlow allocates all memory, but torch can need some. On the classroom
    cluster the list is empty and the machine's real GPUs are hidden, because the cluster's
    GPUs are simulated. Raises UserError if Slurm gave this node GPUs but TensorFlow sees none;
    `already_reported` is True if another process prints that error.
    """
    visible = tf.config.list_physical_devices("GPU")
    if os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM:
        _make_visible([])
        return []
    allocated_gpus = integer(os.environ, "SLURM_GPUS_ON_NODE", 0)
    if allocated_gpus and not visible:
        raise UserError(
            f"Slurm gave this node {pluralize(allocated_gpus, 'GPU')}, but TensorFlow "
            f"{tf.__version__} sees none: install its CUDA build in a separate "
            "environment (lesson 07's page shows how), or ask Slurm for no GPU. "
            "TF_CPP_MIN_LOG_LEVEL=0 makes TensorFlow print which library it misses.",
            already_reported,
        )
    # RuntimeError: TensorFlow has started already and keeps its setting. That is harmless.
    with suppress(RuntimeError):
        for gpu in visible:
            tf.config.experimental.set_memory_growth(gpu, True)
    return visible


def _make_visible(gpus: list["tf.config.PhysicalDevice"]) -> None:
    # RuntimeError: TensorFlow has started already and keeps its setting. That is harmless.
    with suppress(RuntimeError):
        tf.config.set_visible_devices(gpus, "GPU")


def devices(count: int | None = None, exact: bool = False) -> list[str]:
    """`count` devices, one for each replica: ["GPU:0", …], or ["CPU:0", …] without a GPU.

    The default is all GPUs, or two logical devices of the CPU. Without a GPU this function
    divides the CPU into logical devices, so call it before TensorFlow's first operation. With
    `exact`, GPUs compute in full fp32 and deterministically, which makes runs comparable.
    Raises UserError if it is called too late, or if there are GPUs, but fewer than `count`.
    """
    if count is not None and count < 1:
        raise UserError(f"{count} devices asked for: give 1 or more.")
    visible = gpus()
    count = count or len(visible) or 2
    if exact:
        tf.config.experimental.enable_tensor_float_32_execution(False)
        tf.config.experimental.enable_op_determinism()
    if visible and count > len(visible):
        raise UserError(
            f"{pluralize(count, 'device')} asked for, but TensorFlow sees "
            f"{pluralize(len(visible), 'GPU')}: ask for {len(visible)}, or hide all GPUs with "
            "CUDA_VISIBLE_DEVICES= and use logical devices of the CPU."
        )
    if visible:
        _make_visible(visible[:count])
        return [f"GPU:{index}" for index in range(count)]
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * count
    try:
        tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError:
        existing = len(tf.config.list_logical_devices("CPU"))
        if existing < count:
            raise UserError(
                f"TensorFlow has started with {pluralize(existing, 'CPU device')}, so it "
                f"cannot make {count}: ask for devices before its first operation; in a "
                "notebook, restart the kernel."
            ) from None
    return [f"CPU:{index}" for index in range(count)]


def describe(devices: list[str]) -> str:
    """One line that names the devices, for the top of a log."""
    if devices[0].startswith("GPU"):
        return f"devices: {', '.join(devices)}"
    return (
        f"devices: {', '.join(devices)}, logical devices of one CPU (TensorFlow sees no GPU)"
    )


def cnn(
    image_shape: tuple[int, int, int] = (1, 8, 8), classes: int = 10, seed: int = 0
) -> "tf.keras.Sequential":
    """`multigpu.models.CNN` in Keras, with the weights that torch draws for `seed`.

    `image_shape` is PyTorch's: channels, height, width. The model takes images (batch, height,
    width, channels). At a stride of 2, Keras's "same" pads an even size on one side only,
    unlike PyTorch's padding=1, so a padding layer stands before that convolution.
    """
    channels, height, width = image_shape
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input((height, width, channels)),
            layers.Conv2D(16, kernel_size=3, padding="same", activation="tanh"),
            layers.ZeroPadding2D(1),
            layers.Conv2D(32, kernel_size=3, strides=2, activation="tanh"),
            layers.Flatten(),
            layers.Dense(64, activation="tanh"),
            layers.Dense(classes),
        ]
    )
    model.set_weights(first_weights((height, width, channels), seed, classes))
    return model


def first_weights(
    shape: tuple[int, int, int], seed: int, classes: int = 10
) -> list[np.ndarray]:
    """The weights that torch draws for `seed`, in Keras's order and shapes.

    `shape` is Keras's: the height, width and channels of an image.
    """
    height, width, channels = shape
    torch.manual_seed(seed)
    return keras_weights(models.CNN((channels, height, width), classes))


def keras_weights(model: models.CNN) -> list[np.ndarray]:
    """PyTorch's parameters in Keras's order and shapes.

    A convolution's (out, in, height, width) becomes (height, width, in, out); a linear layer's
    (out, in) becomes (in, out).
    """
    conv1, conv2, fc1, fc2 = model.conv1, model.conv2, model.fc1, model.fc2
    side = [(size + 1) // 2 for size in model.image_shape[1:]]
    # flatten() reads (channels, height, width) in PyTorch, (height, width, channels) in Keras.
    by_channel = fc1.weight.unflatten(1, (conv2.out_channels, *side))
    fc1_weight = by_channel.permute(2, 3, 1, 0).flatten(0, 2)
    tensors = [
        conv1.weight.permute(2, 3, 1, 0),
        conv1.bias,
        conv2.weight.permute(2, 3, 1, 0),
        conv2.bias,
        fc1_weight,
        fc1.bias,
        fc2.weight.T,
        fc2.bias,
    ]
    return [tensor.detach().cpu().numpy() for tensor in tensors]


def shape(dataset: TensorDataset) -> tuple[int, int, int]:
    """The height, width and channels of an image of the data set."""
    channels, height, width = dataset[0][0].shape
    return height, width, channels


def arrays(dataset: TensorDataset) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 (n, height, width, channels) and labels int64 (n,), for TensorFlow."""
    images, labels = dataset.tensors
    return np.ascontiguousarray(images.numpy().transpose(0, 2, 3, 1)), labels.numpy()


def tensors(dataset: TensorDataset) -> tuple["tf.Tensor", "tf.Tensor"]:
    """`arrays` as tensors in main memory, for the functions of a tf.data pipeline.

    A NumPy array that such a function uses is copied into its graph, whose limit is 2 GiB; a
    tensor is not copied.
    """
    images, labels = arrays(dataset)
    with tf.device("CPU:0"):
        return tf.constant(images), tf.constant(labels)


def padded_batches(
    dataset: TensorDataset, batch_size: int, replicas: int
) -> "tf.data.Dataset":
    """Batches of (images, labels, sample weights) in which every replica gets images.

    The last batch is padded with images from the beginning. A sample weight is 1 / (images in
    a batch of all replicas), and 0 for padding. `batch_size` is the number of images per
    replica.
    """
    images, labels = arrays(dataset)
    batch = min(batch_size, -(-len(labels) // replicas)) * replicas
    numbers = np.arange(-(-len(labels) // batch) * batch)
    weights = (numbers < len(labels)).astype(np.float32) / batch
    numbers %= len(labels)
    with tf.device("CPU:0"):  # main memory
        rows = (images[numbers], labels[numbers], weights)
        return tf.data.Dataset.from_tensor_slices(rows).batch(batch)


def check_batch(batch_size: int, replicas: int) -> None:
    """Raise UserError if a global batch cannot be split evenly over the replicas."""
    if batch_size % replicas:
        near = max(1, round(batch_size / replicas)) * replicas
        raise UserError(
            f"--batch-size {batch_size} cannot be split evenly over "
            f"{pluralize(replicas, 'replica')}: "
            f"give {near}, or another multiple of {replicas}."
        )


def check_shards(images: int, batch_size: int, replicas: int, fit: bool = False) -> None:
    """Raise UserError for a batch that the replicas cannot share.

    A full batch must be a multiple of the replicas, and in an epoch's last batch each replica
    must get an image. With `fit`, the first batch must be even, too, if it is the last one.

    TensorFlow splits a batch into shards of one size, rounded up, until no image is left. A
    convolution of oneDNN, TensorFlow's default on CPUs, does not accept an empty shard. Keras
    3's fit adds the first batch's shards to learn their shape, so they must have one size.
    """
    check_batch(batch_size, replicas)
    last = images % batch_size or batch_size
    per_shard = -(-last // replicas)
    if -(-last // per_shard) < replicas:
        raise UserError(
            f"the last batch of an epoch has {pluralize(last, 'image')}, too few for "
            f"{replicas} replicas: change --batch-size (it is {batch_size}), or use fewer "
            f"--devices."
        )
    if fit and images < batch_size and images % replicas:
        raise UserError(
            f"the first batch has all {images} images, which {replicas} replicas cannot share "
            "evenly, and Keras's fit does not accept such a first batch: "
            f"give --batch-size {images // replicas * replicas} or less."
        )


def restore(checkpoint: "tf.train.Checkpoint", path: str) -> None:
    """Restore everything in a checkpoint from the files PATH.index and PATH.data-…

    Its `settings` is a variable with the settings of a run as text. Raises UserError if there
    are no such files, or if they are of another model or other settings.
    """
    settings = checkpoint.settings.numpy().decode()
    try:
        checkpoint.restore(path).assert_consumed()
    except (tf.errors.OpError, AssertionError, ValueError):
        raise UserError(
            f"{path} is no checkpoint of this model: give the path of a run's ckpt-N, "
            "without .index."
        ) from None
    saved = checkpoint.settings.numpy().decode()
    if saved != settings:
        raise UserError(f"{path} was written with {saved}, this run has {settings}.")


def epoch_order(images: int, epoch: int, seed: int) -> np.ndarray:
    """The order of the images in an epoch (from 0), as in PyTorch's DistributedSampler."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(images, generator=generator).numpy()


def train_serially(
    model: "tf.keras.Model",
    train: TensorDataset,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> list[float]:
    """Train `model` on one device, without tf.distribute, and return each step's loss.

    It does the same for Keras as proof.train_serially for PyTorch.
    """
    images, labels = arrays(train)
    optimizer = tf.keras.optimizers.SGD(lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    mean_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(batch_images: tf.Tensor, batch_labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = mean_loss(batch_labels, model(batch_images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = []
    for epoch in range(epochs):
        shuffled = epoch_order(len(labels), epoch, seed)
        for start in range(0, len(labels), batch_size):
            batch = shuffled[start : start + batch_size]
            loss = step(tf.constant(images[batch]), tf.constant(labels[batch]))
            losses.append(loss.numpy().item())
    return losses


def difference(model: "tf.keras.Model", other: "tf.keras.Model") -> float:
    """The largest absolute difference between the weights of two Keras models."""
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return proof.largest(float(np.abs(a - b).max()) for a, b in pairs)


def prove(
    claim: str,
    trained: "tf.keras.Model",
    fresh: "tf.keras.Model",
    train: TensorDataset,
    args: Namespace,
) -> bool:
    """Train `fresh` on one device, compare it with `trained`, and print the proof's line.

    The serial run takes epochs, batch_size, lr and seed from `args`. Returns whether the
    proof holds: no weight differs by more than 1e-5.
    """
    train_serially(
        fresh,
        train,
        epochs=args.epochs,
        batch_size=args.batch_size,
        lr=args.lr,
        seed=args.seed,
    )
    return proof.verdict(claim, difference(fresh, trained), 1e-5)["holds"]
