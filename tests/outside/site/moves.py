"""Whether a script's training moves its weights: only then do equal losses say much.

A step of an optimizer counts if a weight with a gradient other than 0 has another value after
it. Weight decay alone does not.
"""

from pathlib import Path

import torch
from torch.optim import optimizer as optimizers


def watch(folder):
    """Write the file "stepped" into `folder` at a step, and "moved" when a weight moves."""
    stepped, moved = Path(folder, "stepped"), Path(folder, "moved")
    before = {}

    def keep(optimizer, *_):
        if moved.exists():
            return
        stepped.touch()
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        before[optimizer] = [
            (one, _own(one).clone())
            for one in parameters
            if one.grad is not None and _own(one.grad).any()
        ]

    def compare(optimizer, *_):
        if any(not torch.equal(_own(one), old) for one, old in before.pop(optimizer, ())):
            moved.touch()

    optimizers.register_optimizer_step_pre_hook(keep)
    optimizers.register_optimizer_step_post_hook(compare)


def _own(tensor):
    """This rank's part of a DTensor; another tensor as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
