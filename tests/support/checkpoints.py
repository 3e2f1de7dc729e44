"""A checkpoint of a small model, for tests and for a process that is killed while it saves."""

from pathlib import Path

import torch

from multigpu.checkpoint import Checkpoint
from multigpu.launch.world import World

SETTINGS = {"--seed": 0}


def make(path: Path, width: int = 4, settings=SETTINGS) -> Checkpoint:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.Adam(model.parameters())
    return Checkpoint(path, {"model": model, "optimizer": optimizer}, settings, World())
