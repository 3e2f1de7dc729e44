"""A small data set for runs of seconds."""

from pathlib import Path

import numpy as np


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
