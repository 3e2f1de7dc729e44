"""Makes a run repeatable: Python, NumPy, torch and the order of the data use the same seed."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from multigpu.elastic.checkpoint_file import random_states, set_random_states
from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero

# Lightning's names. Ranks that are started later read these variables.
SEED_VARIABLE = "PL_GLOBAL_SEED"
WORKERS_VARIABLE = "PL_SEED_WORKERS"


def seed_everything(
    seed: int | None = None, workers: bool = False, verbose: bool = True
) -> int:
    """Seed Python, NumPy and torch, in this process and in ranks that it starts; return the
    seed.

    seed      None: the seed that was set before, else 0
    workers   True: also seed DataLoader workers, each from its number and rank; otherwise the
              workers of different ranks draw the same numbers
    """
    if seed is None:
        seed = data_seed()
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UserError(
            f"the seed is {seed!r}: expected a whole number from 0 to {2**32 - 1}."
        )
    os.environ[SEED_VARIABLE] = str(seed)
    os.environ[WORKERS_VARIABLE] = str(int(workers))
    if verbose and is_rank_zero():
        print(f"Seed set to {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def data_seed() -> int:
    """The seed of the data's order, the same on all ranks."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def seed_workers(loader: Any, rank: int) -> None:
    """Make a DataLoader seed its workers after seed_everything(workers=True), unless the user
    has set worker_init_fn.
    """
    wanted = int(os.environ.get(WORKERS_VARIABLE, "0"))
    if wanted and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(_seed_worker, rank=rank)


def _seed_worker(worker: int, rank: int) -> None:
    """Seed a worker from torch's base seed (a new one in each epoch), the rank, and the
    worker's number.
    """
    process_seed = torch.initial_seed() - worker
    words = np.random.SeedSequence([process_seed, worker, rank]).generate_state(4)
    torch.manual_seed(int(words[0]) << 32 | int(words[1]))
    random.seed(words.tobytes())
    np.random.seed(words)


@contextmanager
def same_seed(number: int) -> Iterator[None]:
    """A context in which all ranks draw the same numbers from torch, NumPy and Python.

    The previous random states are restored at its end.
    """
    with preserved_random_states():
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.manual_seed(number)
        yield


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """A context that restores the random states at its end."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
