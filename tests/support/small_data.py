"""A small data set for runs of seconds."""

from pathlib import Path

import numpy as np


def write_digits(path: Path, train: int, test: int) -> Path:
    """Write the first images of scikit-learn's digits, from 0 to 1; return the path."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target
    arrays = {}
    for part, rows in (("train", slice(train)), ("test", slice(train, train + test))):
        arrays |= {f"x_{part}": images[rows], f"y_{part}": labels[rows]}
    np.savez(path, **arrays)
    return path


def write_npz(path: Path, train: int = 35, test: int = 7) -> Path:
    """Write random images (8 × 8) of 3 classes, the same ones each time; return the path."""
    source = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", train), ("test", test)):
        arrays[f"x_{part}"] = source.integers(0, 256, (n, 8, 8), dtype=np.uint8)
        arrays[f"y_{part}"] = source.integers(0, 3, n)
    # all three classes
    arrays["y_train"][0] = 2
    np.savez(path, **arrays)
    return path
