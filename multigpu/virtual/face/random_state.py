"""torch.cuda's random state: its default generators are those of the virtual GPUs."""

from collections.abc import Iterable
from typing import Any

import torch

from multigpu.virtual.patches import random_functions
from multigpu.virtual.patches.devices import inner
from multigpu.virtual.patches.replacing import Replacement, Row
from multigpu.virtual.sim import machine


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set a GPU's state.

    torch's own function would copy it before the first use, without the attribute that a state
    of a virtual GPU has (ops/generator.py).
    """
    random_functions.set_rng_state(new_state, inner(device))


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the state of each GPU."""
    random_functions.set_rng_state_all(new_states)


_WHY = "the generators of virtual GPUs are not CUDA's"
ROWS: tuple[Row, ...] = (
    Replacement(
        "torch.cuda",
        "default_generators",
        lambda original: tuple(machine.current().generators),
        _WHY,
    ),
    *(
        Replacement(owner, function.__name__, lambda original, new=function: new, _WHY)
        for owner in ("torch.cuda", "torch.cuda.random")
        for function in (set_rng_state, set_rng_state_all)
    ),
)
