"""Load a checkpoint's weights into a module: all of them, or none."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero


def load_weights(
    module: torch.nn.Module, content: dict[str, Any], path: str | Path, strict: bool
) -> None:
    """Load content["state_dict"] into `module`.

    Warns if there are none. If a tensor does not fit, raises UserError with the name of the
    first one. The module is then unchanged.
    """
    saved = content["state_dict"]
    if not saved and is_rank_zero():
        warnings.warn(f"the state dict in {path} contains no parameters.", stacklevel=3)
    # load_state_dict copies the tensors that fit before it raises an error for the others.
    previous = {
        key: value.clone()
        for key, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and not is_lazy(value)
    }
    try:
        module.load_state_dict(saved, strict=strict)
    except RuntimeError as error:
        module.load_state_dict(previous, strict=False)
        difference = _first_difference(saved, previous) or str(error)
        raise UserError(
            f"{path} does not fit {type(module).__name__}: {difference}."
        ) from None


def _first_difference(saved: dict[str, Any], own: dict[str, Any]) -> str:
    saved_shapes = _shapes(saved)
    own_shapes = _shapes(own)
    for key in {**own_shapes, **saved_shapes}:
        in_file = saved_shapes.get(key, "missing")
        in_module = own_shapes.get(key, "missing")
        if in_file != in_module:
            return f"{key} is {in_file} in the file and {in_module} in the module"
    return ""


def _shapes(state: dict[str, Any]) -> dict[str, str]:
    return {
        key: str(tuple(value.shape))
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
