"""The data set of all routes: scikit-learn's digits, or any .npz in MNIST's form."""

import hashlib
import http.client
import os
import urllib.request
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from multigpu.errors import UserError
from multigpu.files import atomic

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
DIGITS_TRAIN = 1437  # of 1,797 images; the other 360 are the test set


def fetch(source: str | None) -> Path:
    """The .npz file for `--data`: a path, a URL that is downloaded, or None for the digits.

    Call it on one rank per node; afterwards the other ranks find the file in the cache
    ($XDG_CACHE_HOME or ~/.cache). If several ranks call it, none sees half a file, because the
    file is written under another name and then renamed. Raises UserError if the file cannot be
    downloaded or written.
    """
    if source is None:
        path = _cache("digits-1.npz")
        if not path.exists():
            try:
                _write_digits(path)
            except OSError as error:
                raise UserError(
                    f"cannot write the digits to {path} ({error.strerror}): "
                    f"make room there, or set XDG_CACHE_HOME to a folder you can write to."
                ) from None
        return path
    if "://" not in source:
        return Path(source)
    # The name is a hash, because two addresses can end in the same file name.
    path = _cache(f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.npz")
    if not path.exists():
        try:
            with (
                atomic(path) as temporary,
                urllib.request.urlopen(source, timeout=60) as response,
            ):
                temporary.write_bytes(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UserError(
                f"cannot download {source} ({error}): "
                f"download it beforehand and give --data FILE.npz."
            ) from None
    return path


def load(path: str | Path) -> tuple[TensorDataset, TensorDataset]:
    """Read the training set and the test set.

    Images are float32 (n, channels, height, width), labels int64 (n,). uint8 images, such
    as MNIST's, are scaled to 0 … 1. Raises UserError if the file is not such a data set.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ARRAYS if name not in file]
            if missing:
                raise UserError(
                    f"{path} has no array {missing[0]}: expected {', '.join(ARRAYS)}, as in "
                    f"MNIST's npz."
                )
            arrays = [file[name] for name in ARRAYS]
    except FileNotFoundError:
        raise UserError(
            f"there is no data file {path}: give --data FILE.npz, or leave it out for the "
            f"digits."
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
        # numpy's message recommends allow_pickle, which would run any code in the file.
        raise UserError(
            f"{path} is not a readable .npz file with arrays of numbers: give another with "
            f"--data, or make it again."
        ) from None
    train = _dataset(path, "train", arrays[0], arrays[1])
    test = _dataset(path, "test", arrays[2], arrays[3])
    if train[0][0].shape != test[0][0].shape:
        raise UserError(
            f"{path}: the images of x_train and x_test have different shapes: "
            f"one model needs images of one shape."
        )
    return train, test


def num_classes(train: TensorDataset, test: TensorDataset) -> int:
    """The number of classes: one more than the largest label."""
    return int(max(train.tensors[1].max(), test.tensors[1].max())) + 1


def _dataset(path: str | Path, part: str, x: np.ndarray, y: np.ndarray) -> TensorDataset:
    if x.ndim not in (3, 4) or len(x) == 0:
        raise UserError(
            f"{path}: x_{part} has shape {x.shape}, expected images (n, height, width) or "
            f"(n, height, width, channels)."
        )
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise UserError(
            f"{path}: y_{part} must hold {len(x)} whole numbers from 0 up, one per image; "
            f"it is {y.dtype}{y.shape}."
        )
    if x.dtype.kind not in "uif":
        raise UserError(f"{path}: x_{part} holds {x.dtype}, expected numbers.")
    scale = 255 if x.dtype == np.uint8 else 1
    images = torch.from_numpy(x.astype(np.float32) / scale)
    if not torch.isfinite(images).all():
        raise UserError(
            f"{path}: x_{part} holds values that are not finite (NaN or infinity): "
            f"clean the data first."
        )
    # channels before height and width, as torch's convolutions expect
    images = images.unsqueeze(1) if images.ndim == 3 else images.movedim(3, 1).contiguous()
    return TensorDataset(images, torch.from_numpy(y.astype(np.int64)))


def _write_digits(path: Path) -> None:
    # This import is slow. Only the first run needs it: later runs read the cache.
    from sklearn.datasets import load_digits

    digits = load_digits()
    # The numbers of a RandomState are the same in every version of numpy.
    order = np.random.RandomState(0).permutation(len(digits.target))
    x = (digits.images[order] / 16).astype(np.float32)
    y = digits.target[order]
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
            f"cannot make the cache folder {folder} ({error.strerror}): "
            f"set XDG_CACHE_HOME to a folder you can write to."
        ) from None
    return folder / name
