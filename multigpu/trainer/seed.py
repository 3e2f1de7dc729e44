"""How is a run made repeatable? One seed for Python, numpy and torch, and the same for the order of the data."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from multigpu.checkpoint import random_states, set_random_states
from multigpu.errors import UserError
from multigpu.world import speaks

NAME = "PL_GLOBAL_SEED"  # Lightning's name: ranks that are started later read it


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, numpy and torch, in this process and in ranks started from it; give the seed.

    None: the seed that was set before, or 0. With `workers` a DataLoader's workers are seeded, each by its number and rank.
    """
    if seed is None:
        seed = int(os.environ.get(NAME, "0"))
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UserError(f"the seed is {seed!r}: expected a whole number from 0 to {2**32 - 1}.")
    os.environ[NAME] = str(seed)
    os.environ["PL_SEED_WORKERS"] = str(int(workers))
    if verbose and speaks():
        print(f"Seed set to {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def of_the_data() -> int:
    """The seed of the order in which ranks share the data."""
    return int(os.environ.get(NAME, "0"))


@contextmanager
def untouched() -> Iterator[None]:
    """What is random in here leaves no trace: the states afterwards are those before."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
