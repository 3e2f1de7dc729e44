"""Read a checkpoint file."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from multigpu.errors import UserError


def read_checkpoint(
    path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
) -> dict[str, Any]:
    """The contents of a checkpoint file of this Trainer or of Lightning's.

    Raises UserError if the file does not exist or is not a checkpoint. A file that contains
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
