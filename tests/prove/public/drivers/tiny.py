"""What the drivers share: the ranks, the rows of a step, a small model."""

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType

import torch
from torch import nn
from torch.distributed import (
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
)
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


def without_init(*packages: str) -> None:
    """Let modules of these packages be imported without the packages' own __init__.py.

    It would import all of the repository, and what that needs: torchvision, pydantic 1, sound.
    """
    for name in packages:
        sys.modules[name] = module_from_spec(find_spec(name))


class _Absent(ModuleType):
    """A module that has each name it is asked for, as an empty class."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def absent(*modules: str) -> None:
    """Let the repository import these modules, of which the case uses nothing."""
    for name in modules:
        sys.modules[name] = _Absent(name)


def start() -> None:
    """Join the ranks that torchrun has started, and seed them all alike."""
    init_process_group("gloo")
    torch.manual_seed(0)


def end() -> None:
    destroy_process_group()


def share(rows: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a batch: all ranks together have the batch."""
    return rows.chunk(get_world_size())[get_rank()]


def batches(rows: int, seed: int = 1, count: int = STEPS) -> list[torch.Tensor]:
    """Batches of eight features, the same in each rank and for each number of ranks."""
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 8, generator=numbers) for _ in range(count)]


def model(outputs: int = 6) -> nn.Module:
    """Two layers, without anything that mixes rows or draws random numbers."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs))


def parallel(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module)
