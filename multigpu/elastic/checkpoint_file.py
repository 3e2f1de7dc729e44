"""What a checkpoint file holds, checked before anything is restored; random states.

The file is a dict with format, parts (the state_dict of each) and settings, which must be the
same when the run goes on.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multigpu.errors import UserError

FORMAT = 1


def random_states() -> dict:
    """This process's random states: torch's (CPU and current GPU), numpy's, Python's."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [name, keys.tolist(), *rest],
        "python": random.getstate(),
    }


def set_random_states(states: dict) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    np.random.set_state(tuple(states["numpy"]))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))


def read(path: str | Path) -> dict:
    """The content of a checkpoint file, on the CPU.

    Raises UserError if it is missing, truncated, or not a checkpoint of this course.
    """
    try:
        # weights_only: tensors and plain values only, no code
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(
            f"there is no checkpoint {path}: "
            f"give another path, or leave out --resume to start a new run."
        ) from None
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder: give the checkpoint in it, --resume "
            f"{Path(path) / 'last.pt'}."
        ) from None
    except PermissionError:
        raise UserError(
            f"this user has no permission to read {path}: change the file's permissions."
        ) from None
    except Exception:
        # A damaged file can make the unpickler raise any exception.
        raise UserError(
            f"{path} is truncated or not a checkpoint: "
            f"resume from another, or start a new run without --resume."
        ) from None
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or not {"parts", "settings"} <= set(content)
    ):
        raise UserError(
            f"{path} is not a checkpoint of this course (format {FORMAT}): "
            f"give another, or start a new run."
        )
    return content


def compare(
    path: str | Path,
    content: dict,
    parts: dict[str, Any],
    settings: dict,
    new_run: str = "start a new run without --resume",
) -> None:
    """Raise UserError if the checkpoint is of another model or of other settings.

    `new_run` says in the message how to start a new run.
    """
    for name, part in parts.items():
        if name not in content["parts"]:
            raise UserError(f"{path} has no {name}: it is a checkpoint of another run.")
        saved = content["parts"][name]
        if isinstance(part, torch.optim.Optimizer):
            _compare_optimizers(path, saved, part.state_dict())
        if name == "model":
            _compare_models(path, saved, part.state_dict())
    for name, value in settings.items():
        saved = content["settings"].get(name)
        if saved != value:
            same = f"the same {name}"
            if name == "--batch-size":
                same += ", on a number of ranks that divides it"
            raise UserError(
                f"{path} was written with {name} {saved}, this run has {value}: the run would "
                f"not be the same. Give {same}, or {new_run}."
            )


def _compare_optimizers(path: str | Path, saved: dict, current: dict) -> None:
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    current_sizes = [len(group["params"]) for group in current["param_groups"]]
    if saved_sizes != current_sizes:
        raise UserError(
            f"{path} is a checkpoint of another model: its optimizer has {saved_sizes} "
            f"parameters per group, this run's has {current_sizes}."
        )


def _compare_models(path: str | Path, saved: dict, current: dict) -> None:
    saved_shapes = {name: tuple(value.shape) for name, value in saved.items()}
    current_shapes = {name: tuple(value.shape) for name, value in current.items()}
    for name in [*current_shapes, *saved_shapes]:
        in_file = saved_shapes.get(name, "missing")
        in_model = current_shapes.get(name, "missing")
        if in_file != in_model:
            raise UserError(
                f"{path} is a checkpoint of another model: {name} is {in_file} in the file "
                f"and {in_model} in this run's model."
            )
