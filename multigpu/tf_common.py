"""How does TensorFlow take part in the course? With the model, weights, data and order of batches of PyTorch's lessons.

The lessons take `tf` from here: TensorFlow without the messages of its start, and a sentence where it is missing. Nothing
else of the library imports this module, so whoever does not open lessons 07 and 08 needs no TensorFlow.
"""

import os
import sys
from argparse import Namespace
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from multigpu import models, proof
from multigpu.devices import CLASSROOM
from multigpu.errors import UserError, pluralize
from multigpu.launch.world import integer

# TensorFlow reads these once, when it is imported. Level 2 leaves its errors; 0 lets it say, too, why it sees no GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault(
    "TF_ENABLE_ONEDNN_OPTS", "0"
)  # oneDNN announces itself, and sums in another order on each CPU

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    missing = UserError(
        "TensorFlow is not there, and lessons 07 and 08 need it: pip install -c constraints.txt -e '.[tensorflow]' "
        "from the repository's root (with GPUs '.[tensorflow-gpu]')."
    )
    if "IPython" in sys.modules:  # in a notebook one reads the exception
        raise missing from None
    print(f"error: {missing}", file=sys.stderr)
    sys.exit(2)  # a script cannot catch what its imports raise

tf.get_logger().setLevel("WARNING")  # in a notebook it tells of every all-reduce


def gpus(quiet: bool = False) -> list[Any]:
    """The GPUs that TensorFlow sees, its PhysicalDevices. Raises UserError if it sees none where Slurm gave some.

    They take memory as they need it from here on, since torch may want some, too; by default TensorFlow takes it all.
    The classroom cluster's GPUs are pretended: a machine's real ones are hidden there.
    """
    found = tf.config.list_physical_devices("GPU")
    if os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM:
        _use([])
        return []
    promised = integer(os.environ, "SLURM_GPUS_ON_NODE", 0)
    if promised and not found:
        raise UserError(
            f"Slurm gave this node {pluralize(promised, 'GPU')}, but TensorFlow {tf.__version__} sees none: install its CUDA "
            f"build in an environment of its own (lesson 07's page says how), or ask Slurm for no GPU. "
            f"TF_CPP_MIN_LOG_LEVEL=0 lets TensorFlow say what it misses.",
            quiet,
        )
    with suppress(RuntimeError):  # TensorFlow has started: too late to change, and no harm
        for gpu in found:
            tf.config.experimental.set_memory_growth(gpu, True)
    return found


def _use(gpus: list[Any]) -> None:
    with suppress(RuntimeError):  # TensorFlow has started: too late to change, and no harm
        tf.config.set_visible_devices(gpus, "GPU")


def devices(count: int | None = None, exact: bool = False) -> list[str]:
    """`count` devices to hold a replica each (default: all GPUs, or two parts of the CPU): "GPU:0", … or "CPU:0", …

    Without a GPU the CPU is divided into logical devices. That must come before TensorFlow's first operation. With
    `exact`, GPUs compute in full 32 bit and the same way each time, so that two runs can be compared.
    Raises UserError if it comes too late, or if there are some GPUs, but not `count`.
    """
    found = gpus()
    count = count or len(found) or 2
    if exact:
        tf.config.experimental.enable_tensor_float_32_execution(False)
        tf.config.experimental.enable_op_determinism()
    if found and count > len(found):
        raise UserError(
            f"{pluralize(count, 'device')} asked for, but TensorFlow sees {pluralize(len(found), 'GPU')}: "
            f"ask for {len(found)}, or hide all GPUs with CUDA_VISIBLE_DEVICES= and have parts of the CPU instead."
        )
    if found:
        _use(found[:count])
        return [f"GPU:{index}" for index in range(count)]
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError:
        if (have := len(tf.config.list_logical_devices("CPU"))) < count:
            raise UserError(
                f"TensorFlow has started with {pluralize(have, 'CPU device')}, and cannot be given {count} any more: "
                f"ask for devices before its first operation; in a notebook, restart the kernel."
            ) from None
    return [f"CPU:{index}" for index in range(count)]


def describe(places: list[str]) -> str:
    """One line on who computes where, for the top of a log."""
    if places[0].startswith("GPU"):
        return f"devices: {', '.join(places)}"
    return f"devices: {', '.join(places)}, parts of one CPU (TensorFlow sees no GPU)"


def torch_device(places: list[str]) -> torch.device:
    """What torch calls this kind of device, for metrics.report."""
    return torch.device("cuda" if places[0].startswith("GPU") else "cpu")


def cnn(
    image_shape: tuple[int, int, int] = (1, 8, 8), classes: int = 10, seed: int = 0
) -> Any:
    """`multigpu.models.CNN` in Keras, with the weights that torch draws for `seed`: images (batch, height, width, channels).

    `image_shape` is PyTorch's: channels, height, width. At a stride of 2, Keras's "same" pads an even size on one side
    only, unlike PyTorch's padding=1: that is written out.
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
            layers.Dense(
                classes, dtype="float32"
            ),  # the logits stay in 32 bit under mixed precision
        ]
    )
    torch.manual_seed(seed)
    model.set_weights(keras_weights(models.CNN(image_shape, classes)))
    return model


def keras_weights(model: models.CNN) -> list[np.ndarray]:
    """PyTorch's parameters in Keras's order and shapes: (out, in, height, width) becomes (height, width, in, out)."""
    conv1, conv2, fc1, fc2 = model.conv1, model.conv2, model.fc1, model.fc2
    channels = conv2.out_channels
    side = [(size + 1) // 2 for size in model.image_shape[1:]]
    # flatten() runs through the channels first in PyTorch, and last in Keras
    flat = fc1.weight.unflatten(1, (channels, *side)).permute(2, 3, 1, 0).flatten(0, 2)
    tensors = [
        conv1.weight.permute(2, 3, 1, 0),
        conv1.bias,
        conv2.weight.permute(2, 3, 1, 0),
        conv2.bias,
    ]
    return [
        tensor.detach().cpu().numpy()
        for tensor in (*tensors, flat, fc1.bias, fc2.weight.T, fc2.bias)
    ]


def arrays(dataset: TensorDataset) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 (n, height, width, channels) and labels int64 (n,): TensorFlow has the channels last."""
    images, labels = dataset.tensors
    return np.ascontiguousarray(images.numpy().transpose(0, 2, 3, 1)), labels.numpy()


def tensors(dataset: TensorDataset) -> tuple[Any, Any]:
    """`arrays` as TensorFlow's tensors, in main memory, for the functions of a tf.data pipeline.

    A NumPy array that such a function uses is copied into its graph, which may not exceed 2 GiB; a tensor is not.
    """
    with tf.device("CPU:0"):
        images, labels = (tf.constant(array) for array in arrays(dataset))
    return images, labels


def filled(dataset: TensorDataset, batch_size: int, replicas: int) -> Any:
    """A tf.data.Dataset of (images, labels, weights) in which no replica goes without: the last batch is filled up.

    A weight is 1 / (images in a batch of all replicas), and 0 for an image that fills up. `batch_size` is a replica's.
    """
    images, labels = arrays(dataset)
    batch = min(batch_size, -(-len(labels) // replicas)) * replicas
    numbers = np.arange(-(-len(labels) // batch) * batch)
    weights = (numbers < len(labels)).astype(np.float32) / batch
    numbers %= len(labels)
    with tf.device("CPU:0"):  # main memory
        return tf.data.Dataset.from_tensor_slices(
            (images[numbers], labels[numbers], weights)
        ).batch(batch)


def refuse_pieces(images: int, batch_size: int, replicas: int, fit: bool = False) -> None:
    """Raises UserError if the last batch leaves a replica without an image, or if `fit` cannot begin.

    TensorFlow splits a batch into pieces of the same size, rounded up, until there is none left. A convolution of oneDNN,
    which TensorFlow uses on CPUs unless told otherwise, does not take an empty piece. Keras 3's fit adds up the first
    batch's pieces to learn their shape, so they must be of one size.
    """
    last = images % batch_size or batch_size
    if -(-last // -(-last // replicas)) < replicas:
        raise UserError(
            f"the last batch of an epoch has {pluralize(last, 'image')}, too few for {replicas} replicas: "
            f"give another --batch-size than {batch_size}, or fewer --devices."
        )
    if fit and images < batch_size and images % replicas:
        raise UserError(
            f"the first batch has all {images} images, which {replicas} replicas cannot share evenly, and Keras's fit does "
            f"not begin with such a batch: give --batch-size {images // replicas * replicas} or less."
        )


def order(images: int, epoch: int, seed: int) -> np.ndarray:
    """The order of the images in an epoch (from 0): PyTorch's DistributedSampler deals them out in the same."""
    return torch.randperm(
        images, generator=torch.Generator().manual_seed(seed + epoch)
    ).numpy()


def serial(
    model: Any, train: TensorDataset, *, epochs: int, batch_size: int, lr: float, seed: int
) -> list[float]:
    """Train the Keras `model` on one device, with nothing of tf.distribute; the loss of each step. See proof.serial."""
    images, labels = arrays(train)
    optimizer = tf.keras.optimizers.SGD(lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True
    )  # the mean over the batch

    @tf.function(reduce_retracing=True)
    def step(batch_images: Any, batch_labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(batch_labels, model(batch_images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = []
    for epoch in range(epochs):
        shuffled = order(len(labels), epoch, seed)
        for start in range(0, len(labels), batch_size):
            batch = shuffled[start : start + batch_size]
            losses.append(
                step(tf.constant(images[batch]), tf.constant(labels[batch])).numpy().item()
            )
    return losses


def difference(one: Any, other: Any) -> float:
    """The largest absolute difference between two Keras models' weights, over all of their numbers."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def against_serial(
    what: str, trained: Any, fresh: Any, train: TensorDataset, args: Namespace
) -> dict:
    """Train the Keras model `fresh` serially with the flags of the other run, and compare: as proof.against_serial."""
    serial(
        fresh,
        train,
        epochs=args.epochs,
        batch_size=args.batch_size,
        lr=args.lr,
        seed=args.seed,
    )
    return proof.verdict(
        f"{what} after {pluralize(args.epochs, 'epoch')}", difference(fresh, trained), 1e-5
    )
