"""The checkpoints of an elastic run, for all its ranks: rank 0 reads and writes them."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from multigpu.elastic import checkpoint_file
from multigpu.elastic.folder import CheckpointFolder
from multigpu.elastic.writer import Writer
from multigpu.launch.rendezvous import fail_together
from multigpu.launch.world import find_world


class Checkpoints:
    """The checkpoints of one run. All ranks call `load` first, then `save` and `wait`.

    path      their folder, which all nodes must share
    settings  what must be the same in each start of the run: {"--seed": 0, …}
    writer    rank 0's; None on the other ranks
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.folder = CheckpointFolder(path)
        self.settings = settings
        self.writer: Writer | None = None

    def load(self, parts: dict[str, Any]) -> dict | None:
        """Restore `parts` from the newest good checkpoint; return its position.

        `parts` are objects with state_dict: {"model": …, "optimizer": …}. Rank 0 reads, and
        sends the content to the others. Returns None if there is no checkpoint. Rank 0 locks
        the folder until its process ends.

        Raises UserError, on all ranks, if another run has locked the folder, if the nodes do
        not share it, if the checkpoint is of another model or has other settings, or if there
        are checkpoints and none is good.
        """
        world = find_world()
        contents: list[dict | None] = [None]
        with fail_together(world):
            if world.rank == 0:
                self.folder.open()
        self.folder.require_shared(world)
        with fail_together(world):
            if world.rank == 0:
                newest = self.folder.newest()
                self.writer = Writer(self.folder)
                if newest is not None:
                    path, contents[0] = newest
                    other = "give another --out for a new run"
                    checkpoint_file.compare(path, contents[0], parts, self.settings, other)
                    print(f"resumed from {path}", flush=True)
        dist.broadcast_object_list(contents, src=0)
        if contents[0] is None:
            return None
        for name, part in parts.items():
            part.load_state_dict(contents[0]["parts"][name])
        return contents[0]["position"]

    def save(self, step: int, parts: dict[str, Any], position: dict) -> None:
        """Copy the parts' states now; a thread of rank 0 writes the copy as step's checkpoint.

        If it cannot be written, a warning says so: the earlier ones stay, training goes on.
        """
        if self.writer is not None:
            content = {
                "format": checkpoint_file.FORMAT,
                "parts": {name: part.state_dict() for name, part in parts.items()},
                "settings": self.settings,
                "position": position,
            }
            self.writer.save(step, content)

    def wait(self) -> None:
        """Wait until the last checkpoint is written, or could not be written."""
        if self.writer is not None:
            self.writer.wait()
