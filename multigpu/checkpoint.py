"""How does a run go on after a kill as if nothing had happened? Everything that shapes the next step is in one file.

The file holds the model, the optimizer, the gradient scaler, each rank's random states, the settings that fix the order
of the data, and the position in it. Every rank calls `save` and `load`; rank 0 alone touches the file, so no shared
file system is needed.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.launch.world import World
from multigpu.rendezvous import fail_together

FORMAT = 1


@dataclass
class Checkpoint:
    """One run's checkpoint file.

    path       where it is written
    parts      what is saved and restored through state_dict: {"model": …, "optimizer": …, …}
    settings   what must be the same when the run goes on: {"--seed": 0, …}
    world      this rank's place
    loaded     the file that `load` restored, None until then
    """

    path: Path
    parts: dict[str, Any]
    settings: dict[str, Any]
    world: World
    loaded: Path | None = None

    def save(self, position: dict) -> None:
        """Write the file, atomically. All ranks call it; rank 0 writes.

        `position` is where the run is, and whatever else it wants back: numbers, texts, lists, tensors.
        """
        states: list[dict | None] = [None] * self.world.size
        dist.all_gather_object(states, random_states())
        with fail_together(self.world):
            if self.world.rank == 0:
                parts = {name: part.state_dict() for name, part in self.parts.items()}
                if not all(torch.isfinite(value).all() for value in parts["model"].values()):
                    raise UserError(
                        "the weights are not finite any more: lower --lr; the last checkpoint is untouched."
                    )
                content = {"format": FORMAT, "parts": parts, "settings": self.settings}
                try:
                    with atomic(self.path) as temporary:
                        torch.save(
                            {**content, "position": position, "random": states}, temporary
                        )
                except (OSError, RuntimeError) as error:
                    raise UserError(
                        f"cannot write {self.path} ({error}): the checkpoint before it is untouched."
                    ) from None

    def load(self, path: str | Path | None) -> dict | None:
        """Restore the parts and the random states from `path`, and return the position. All ranks call it; rank 0 reads.

        `path` is what --resume gave. None: nothing is restored. Empty: the run's own file, if there is one yet, since
        a job that may be queued again says --resume from its first start on. Raises UserError, on all ranks and before
        anything is changed, if the file is missing, truncated, of another model or of other settings. With another
        number of ranks than before, the random states start anew; all else goes on.
        """
        if path is None:
            return None
        box: list[Any] = [None]
        with fail_together(self.world):
            if self.world.rank == 0 and (path or self.path.exists()):
                box[0] = _read(path or self.path)
                _compare(path or self.path, box[0], self.parts, self.settings)
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            return None
        self.loaded = Path(path or self.path)
        for name, part in self.parts.items():
            part.load_state_dict(box[0]["parts"][name])
        if len(box[0]["random"]) == self.world.size:
            set_random_states(box[0]["random"][self.world.rank])
        return box[0]["position"]


class Variables:
    """Keras variables as a part of a checkpoint: tensors, named by their places, in which two runs agree."""

    def __init__(self, variables: list):
        self.named = {
            f"{place}.{variable.name}": variable for place, variable in enumerate(variables)
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            name: torch.from_numpy(np.array(variable)) for name, variable in self.named.items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, variable in self.named.items():
            variable.assign(state[name].numpy())


def random_states() -> dict:
    """This process's random states: torch's on the CPU and on the current GPU, numpy's, Python's."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": [name, keys.tolist(), *rest],
        "python": random.getstate(),
    }


def set_random_states(states: dict) -> None:
    """Undo everything random that happened since `random_states`."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    np.random.set_state(tuple(states["numpy"]))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))


def _read(path: str | Path) -> dict:
    try:
        # weights_only: tensors and plain values, nothing that could run code
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(
            f"there is no checkpoint {path}: give another path, or leave out --resume to start anew."
        ) from None
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder: give the checkpoint in it, --resume {Path(path) / 'last.pt'}."
        ) from None
    except PermissionError:
        raise UserError(
            f"the checkpoint {path} may not be read by this user: change its permissions."
        ) from None
    except Exception:  # a damaged file can make the unpickler raise anything
        raise UserError(
            f"{path} is truncated or not a checkpoint: resume from another, or start anew without --resume."
        ) from None
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or not {"parts", "settings"} <= set(content)
    ):
        raise UserError(
            f"{path} is not a checkpoint of this course (format {FORMAT}): give another, or start anew."
        )
    return content


def _compare(path: str | Path, content: dict, parts: dict[str, Any], settings: dict) -> None:
    """Refuse a checkpoint that does not fit, before anything is changed."""
    for name, part in parts.items():
        if name not in content["parts"]:
            raise UserError(f"{path} holds no {name}: it is a checkpoint of another run.")
        if isinstance(part, torch.optim.Optimizer):
            there, here = (
                [len(group["params"]) for group in state["param_groups"]]
                for state in (content["parts"][name], part.state_dict())
            )
            if there != here:
                raise UserError(
                    f"{path} is a checkpoint of another model: it trains {there} tensors there, {here} here."
                )
        if name != "model":
            continue
        here = {key: tuple(value.shape) for key, value in part.state_dict().items()}
        there = {key: tuple(value.shape) for key, value in content["parts"][name].items()}
        for key in [*here, *there]:
            if here.get(key) != there.get(key):
                a, b = there.get(key, "missing"), here.get(key, "missing")
                raise UserError(
                    f"{path} is a checkpoint of another model: {key} is {a} there and {b} here."
                )
    for name, value in settings.items():
        if (was := content["settings"].get(name)) != value:
            same = f"the same {name}" + (
                ", on a number of ranks that divides it" if name == "--batch-size" else ""
            )
            raise UserError(
                f"{path} was written with {name} {was}, this run has {value}: the run would not be the same. "
                f"Give {same}, or start anew without --resume."
            )
