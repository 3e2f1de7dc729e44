"""How does TensorFlow take part in the course? With the model, weights, data and order of batches of PyTorch's lessons.

The lessons take `tf` from here: TensorFlow without the messages of its start, and a sentence where it is missing. Nothing
else of the library imports this module, so whoever does not open lessons 07 and 08 needs no TensorFlow.
"""

import os
import sys
from argparse import Namespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from multigpu import models, proof
from multigpu.errors import UserError, counted

# TensorFlow reads these once, when it is imported. Warnings and errors stay: level 2 leaves out what is not one.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN announces itself, and sums in another order on each CPU

try:
    import tensorflow as tf
except ImportError:
    missing = UserError(
        "TensorFlow is not there, and lessons 07 and 08 need it: pip install -c constraints.txt -e '.[tensorflow]' "
        "from the repository's root (with GPUs '.[tensorflow-gpu]')."
    )
    if "IPython" in sys.modules or "pytest" in sys.modules:
        raise missing from None
    print(f"error: {missing}", file=sys.stderr)
    sys.exit(2)  # a script cannot catch what its imports raise

__all__ = ["against_serial", "arrays", "cnn", "devices", "gpus", "order", "serial", "tf", "weights"]


def gpus() -> list[str]:
    """The GPUs that TensorFlow sees, as "GPU:0", …"""
    return [gpu.name.removeprefix("/physical_device:") for gpu in tf.config.list_physical_devices("GPU")]


def devices(count: int | None = None) -> list[str]:
    """`count` devices to hold a replica each (default: all GPUs, at least two devices): GPUs, else parts of the CPU.

    Without a GPU the CPU is divided into logical devices. That must come before TensorFlow's first operation.
    Raises UserError if it comes later, or if there are some GPUs, but not `count`.
    """
    found = gpus()
    count = count or max(2, len(found))
    if len(found) >= count:
        return found[:count]
    if found:
        raise UserError(
            f"{counted(count, 'device')} asked for, but TensorFlow sees {counted(len(found), 'GPU')}: "
            f"give --devices {len(found)}, or hide all GPUs with CUDA_VISIBLE_DEVICES=."
        )
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        if (have := len(tf.config.list_logical_devices("CPU"))) < count:
            raise UserError(
                f"TensorFlow has started with {counted(have, 'CPU device')}, and cannot be given {count} any more: "
                f"ask for devices before its first operation; in a notebook, restart the kernel."
            ) from None
    return [f"CPU:{index}" for index in range(count)]


def cnn(image_shape: tuple[int, int, int] = (1, 8, 8), classes: int = 10, seed: int = 0) -> Any:
    """`multigpu.models.CNN` in Keras, with the weights that torch draws for `seed`: images (batch, height, width, channels).

    `image_shape` is PyTorch's: channels, height, width. Keras pads a stride of 2 on one side only, so "same" is not
    PyTorch's padding=1: that is written out.
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
            layers.Dense(classes, dtype="float32"),  # the logits stay in 32 bit under mixed precision
        ]
    )
    torch.manual_seed(seed)
    model.set_weights(weights(models.CNN(image_shape, classes)))
    return model


def weights(model: models.CNN) -> list[np.ndarray]:
    """PyTorch's parameters in Keras's order and shapes: (out, in, height, width) becomes (height, width, in, out)."""
    conv1, conv2, fc1, fc2 = model.conv1, model.conv2, model.fc1, model.fc2
    channels = conv2.out_channels
    side = [(size + 1) // 2 for size in model.image_shape[1:]]
    # flatten() runs through the channels first in PyTorch, and last in Keras
    flat = fc1.weight.unflatten(1, (channels, *side)).permute(2, 3, 1, 0).flatten(0, 2)
    tensors = [conv1.weight.permute(2, 3, 1, 0), conv1.bias, conv2.weight.permute(2, 3, 1, 0), conv2.bias]
    return [tensor.detach().cpu().numpy() for tensor in (*tensors, flat, fc1.bias, fc2.weight.T, fc2.bias)]


def arrays(dataset: TensorDataset) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 (n, height, width, channels) and labels int64 (n,): TensorFlow has the channels last."""
    images, labels = dataset.tensors
    return np.ascontiguousarray(images.numpy().transpose(0, 2, 3, 1)), labels.numpy()


def order(images: int, epoch: int, seed: int) -> np.ndarray:
    """The order of the images in an epoch (from 0): PyTorch's DistributedSampler deals them out in the same."""
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed + epoch)).numpy()


def serial(model: Any, train: TensorDataset, *, epochs: int, batch_size: int, lr: float, seed: int) -> list[float]:
    """Train the Keras `model` on one device, with nothing of tf.distribute; the loss of each step. See proof.serial."""
    images, labels = arrays(train)
    optimizer = tf.keras.optimizers.SGD(lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # the mean over the batch

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
            losses.append(step(tf.constant(images[batch]), tf.constant(labels[batch])).numpy().item())
    return losses


def against_serial(what: str, trained: Any, fresh: Any, train: TensorDataset, args: Namespace) -> dict:
    """Train the Keras model `fresh` serially with the flags of the other run, and compare: as proof.against_serial."""
    serial(fresh, train, epochs=args.epochs, batch_size=args.batch_size, lr=args.lr, seed=args.seed)
    pairs = zip(fresh.get_weights(), trained.get_weights(), strict=True)
    found = max(float(np.abs(one - other).max()) for one, other in pairs)
    return proof.verdict(f"{what} after {counted(args.epochs, 'epoch')}", found, 1e-5)
