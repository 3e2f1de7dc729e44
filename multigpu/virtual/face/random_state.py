"""torch.cuda's random state: its default generators are those of the virtual GPUs."""

from multigpu.virtual.patches.random_functions import set_rng_state, set_rng_state_all
from multigpu.virtual.patches.replacing import Replacement, Row, values
from multigpu.virtual.sim import machine

_WHY = "the generators of virtual GPUs are not CUDA's"
ROWS: tuple[Row, ...] = (
    Replacement(
        "torch.cuda",
        "default_generators",
        lambda original: tuple(machine.current().generators),
        _WHY,
    ),
    # torch's own would copy a state before the first use, without the attribute that a
    # state of a virtual GPU has (ops/generator.py).
    *values(
        ("torch.cuda", "torch.cuda.random"),
        {"set_rng_state": set_rng_state, "set_rng_state_all": set_rng_state_all},
        _WHY,
    ),
)
