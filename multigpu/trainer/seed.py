"""How is a run made repeatable? One seed for Python, numpy and torch, and the same for the order of the data."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from multigpu.checkpoint import random_states, set_random_states
from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero

NAME, WORKERS = (
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
)  # Lightning's names: ranks that are started later read them


def seed_everything(
    seed: int | None = None, workers: bool = False, verbose: bool = True
) -> int:
    """Seed Python, numpy and torch, in this process and in ranks started from it; give the seed.

    None: the seed that was set before, or 0. With `workers` a DataLoader's workers are seeded, each by its number and rank:
    else the same worker of two ranks draws the same numbers.
    """
    if seed is None:
        seed = int(os.environ.get(NAME, "0"))
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UserError(
            f"the seed is {seed!r}: expected a whole number from 0 to {2**32 - 1}."
        )
    os.environ[NAME] = str(seed)
    os.environ[WORKERS] = str(int(workers))
    if verbose and is_rank_zero():
        print(f"Seed set to {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def of_the_data() -> int:
    """The seed of the order in which ranks share the data."""
    return int(os.environ.get(NAME, "0"))


def workers_of(loader: Any, rank: int) -> None:
    """Let the DataLoader seed its workers, if that was asked for and the user does not do it."""
    if (
        isinstance(loader, DataLoader)
        and loader.worker_init_fn is None
        and int(os.environ.get(WORKERS, "0"))
    ):
        loader.worker_init_fn = partial(_seed_a_worker, rank=rank)


def _seed_a_worker(worker: int, rank: int) -> None:
    """By the process's seed, from which torch has drawn one for this epoch, by the rank, and by the worker's number."""
    words = np.random.SeedSequence(
        [torch.initial_seed() - worker, worker, rank]
    ).generate_state(4)
    torch.manual_seed(int(words[0]) << 32 | int(words[1]))
    random.seed(words.tobytes())
    np.random.seed(words)


@contextmanager
def alike(number: int) -> Iterator[None]:
    """All ranks draw the same in here, by torch, NumPy or Python, and it leaves no trace."""
    with untouched():
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.manual_seed(number)
        yield


@contextmanager
def untouched() -> Iterator[None]:
    """What is random in here leaves no trace: the states afterwards are those before."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
