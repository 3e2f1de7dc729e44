"""Files of checkpoints: written by rank 0, read, and their weights loaded into a module."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.launch.rendezvous import fail_together
from multigpu.strategies import Strategy

# The version of Lightning whose keys and names these are.
LIGHTNING_VERSION = "2.6.6"
OWN_KEY = "multigpu"
# The keys that a checkpoint does not have if it contains only weights.
TRAINING_KEYS = ("callbacks", "optimizer_states", "lr_schedulers", "MixedPrecision", OWN_KEY)


def write(
    strategy: Strategy, content: dict[str, Any], path: str | Path, weights_only: bool
) -> None:
    """Write a checkpoint file, atomically. All ranks must call this; only rank 0 writes.

    Raises UserError, on all ranks, if the file cannot be written.
    """
    if weights_only:
        content = {key: value for key, value in content.items() if key not in TRAINING_KEYS}
    # It ends with a barrier: no rank reads the file before it is complete.
    with fail_together(strategy.world, strategy.gather_objects):
        if not strategy.is_global_zero:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic(path) as temporary:
                torch.save(content, temporary)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"cannot write {path} ({error}): free some space there, "
                "or give another dirpath or default_root_dir."
            ) from None


def read(
    path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
) -> dict[str, Any]:
    """The contents of a checkpoint file of this Trainer or of Lightning's.

    Raises UserError if the file cannot be read or is not a checkpoint. A file that contains
    other objects than tensors, numbers, strings and containers of them also raises UserError,
    except with weights_only=False.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(
                path, map_location=map_location, weights_only=weights_only is not False
            )
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}: give another path.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give a checkpoint in it.") from None
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}): give another path, or the permission to "
            f"read it."
        ) from None
    except Exception as error:
        # The unpickler raises many kinds of errors for a damaged file.
        unsupported = re.search(r"Unsupported (?:global|class): (?:GLOBAL )?(\S+)", str(error))
        if unsupported:
            raise UserError(
                f"{path} contains objects that are not numbers or texts ({unsupported[1]}): "
                "give weights_only=False if you trust the author of the file."
            ) from None
        raise UserError(
            f"{path} is truncated or not a checkpoint: give another file."
        ) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise UserError(
            f"{path} contains no 'state_dict', so it is not a Trainer's checkpoint."
        )
    return content


def load_weights(
    module: torch.nn.Module, content: dict[str, Any], path: str | Path, strict: bool
) -> None:
    """Load content["state_dict"] into `module`. Raises UserError if a tensor does not fit."""
    try:
        module.load_state_dict(content["state_dict"], strict=strict)
    except RuntimeError as error:
        title, *tensors = str(error).splitlines()
        first = tensors[0].strip() if tensors else title
        raise UserError(f"{path} does not fit {type(module).__name__}: {first}") from None
