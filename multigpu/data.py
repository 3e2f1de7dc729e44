"""What do all routes learn from? Scikit-learn's real handwritten digits, or any .npz in MNIST's own form."""

import hashlib
import http.client
import os
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from multigpu.errors import UserError
from multigpu.files import atomic

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
DIGITS_TRAIN = 1437  # of 1,797; the rest, 360, is for testing


@dataclass(frozen=True)
class Batch:
    """A global batch and its parts: global_size = ranks × micro_batches × per_micro_batch images.

    global_size      images in one optimizer step, over all ranks
    ranks            processes (or replicas) that share the batch
    micro_batches    forward passes that a rank makes for one optimizer step
    per_micro_batch  images in one forward pass of one rank
    """

    global_size: int
    ranks: int
    micro_batches: int
    per_micro_batch: int

    def images_in_step(self, step: int, images: int) -> int:
        """Images in step number `step` of an epoch of `images`: the last step of an epoch may have fewer."""
        return min(self.global_size, images - step * self.global_size)


def real_rows(
    images: int,
    batch: Batch,
    rank: int,
    index: int,
    rows: int,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Which rows of a rank's micro-batch are images of their own, and not repeats: bool, shape (rows,).

    DistributedSampler repeats images until all ranks have equally many. Image i of a rank is number
    i × ranks + rank in the epoch's order; numbers from `images` up are repeats. They get weight 0 in the loss.

    images   length of the data set
    index    number of the micro-batch in this rank's epoch, from 0
    rows     rows in this micro-batch
    """
    own = index * batch.per_micro_batch + torch.arange(rows, device=device)
    return own * batch.ranks + rank < images


def fetch(source: str | None) -> Path:
    """The .npz file for `--data`: a path, a URL that is downloaded, or None for the digits.

    Call it on one rank a node: the others find the file in the cache ($XDG_CACHE_HOME or ~/.cache) afterwards.
    Even if several ranks call it, none sees half a file: it is written under another name, then renamed.
    """
    if source is None:
        path = _cache("digits-1.npz")
        if not path.exists():
            try:
                _write_digits(path)
            except OSError as error:
                raise UserError(
                    f"cannot write the digits to {path} ({error.strerror}): "
                    f"make room there, or set XDG_CACHE_HOME to a folder that can be written."
                ) from None
        return path
    if "://" not in source:
        return Path(source)
    path = _cache(
        f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.npz"
    )  # two addresses can end in the same name
    if not path.exists():
        try:
            with (
                atomic(path) as temporary,
                urllib.request.urlopen(source, timeout=60) as answer,
            ):
                temporary.write_bytes(answer.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UserError(
                f"cannot download {source} ({error}): download it beforehand and give --data FILE.npz."
            ) from None
    return path


def load(path: str | Path) -> tuple[TensorDataset, TensorDataset]:
    """Read the training and the test set: images float32 (n, channels, height, width), labels int64 (n,).

    uint8 images, as MNIST's, are scaled to 0 … 1. Raises UserError if the file is not such a data set.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ARRAYS if name not in file]
            if missing:
                raise UserError(
                    f"{path} has no array {missing[0]}: expected {', '.join(ARRAYS)}, as in MNIST's npz."
                )
            arrays = [file[name] for name in ARRAYS]
    except FileNotFoundError:
        raise UserError(
            f"there is no data file {path}: give --data FILE.npz, or leave it out for the digits."
        ) from None
    except (
        OSError,
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        AttributeError,
        TypeError,
    ):
        # numpy's own words recommend allow_pickle, which would run whatever code a file brings.
        raise UserError(
            f"{path} is not a readable .npz file with arrays of numbers: give another with --data, or make it again."
        ) from None
    train, test = (
        _dataset(path, part, *arrays[i : i + 2]) for part, i in (("train", 0), ("test", 2))
    )
    if train[0][0].shape != test[0][0].shape:
        raise UserError(
            f"{path}: x_train holds images of another shape than x_test, so one model cannot take both."
        )
    return train, test


def classes(train: TensorDataset, test: TensorDataset) -> int:
    """The number of classes: one more than the largest label."""
    return int(max(train.tensors[1].max(), test.tensors[1].max())) + 1


def checksum(train: TensorDataset) -> str:
    """Eight characters that tell one training set from another."""
    return f"{zlib.crc32(train.tensors[0].numpy().tobytes() + train.tensors[1].numpy().tobytes()):08x}"


def _dataset(path: str | Path, part: str, x: np.ndarray, y: np.ndarray) -> TensorDataset:
    if x.ndim not in (3, 4) or len(x) == 0:
        raise UserError(
            f"{path}: x_{part} has shape {x.shape}, expected images (n, height, width) or (n, height, width, channels)."
        )
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise UserError(
            f"{path}: y_{part} must hold {len(x)} whole numbers from 0 up, one an image; it is {y.dtype}{y.shape}."
        )
    if x.dtype.kind not in "uif":
        raise UserError(f"{path}: x_{part} holds {x.dtype}, expected numbers.")
    images = torch.from_numpy(x.astype(np.float32) / (255 if x.dtype == np.uint8 else 1))
    if not torch.isfinite(images).all():
        raise UserError(
            f"{path}: x_{part} holds values that are not finite (NaN or infinity): clean the data first."
        )
    images = images.unsqueeze(1) if images.ndim == 3 else images.movedim(3, 1).contiguous()
    return TensorDataset(images, torch.from_numpy(y.astype(np.int64)))


def _write_digits(path: Path) -> None:
    from sklearn.datasets import (
        load_digits,  # a slow import, and needed once: later runs read the cache
    )

    digits = load_digits()
    order = np.random.RandomState(0).permutation(
        len(digits.target)
    )  # RandomState's streams are frozen
    x, y = (digits.images[order] / 16).astype(np.float32), digits.target[order]
    n = DIGITS_TRAIN
    with atomic(path) as temporary:
        np.savez_compressed(
            temporary, x_train=x[:n], y_train=y[:n], x_test=x[n:], y_test=y[n:]
        )


def _cache(name: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multigpu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder {folder} ({error.strerror}): set XDG_CACHE_HOME to a folder you can write to."
        ) from None
    return folder / name
