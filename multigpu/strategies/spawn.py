"""ddp_spawn and ddp_notebook: ddp whose ranks are made by this process, from a function instead of a script.

The function travels by value (cloudpickle), so it may come from a notebook's cell, and CUDA may have been used before: no
process is forked. This process takes no part in the training; what came out is brought back to it.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

from multigpu import launch
from multigpu.errors import UserError
from multigpu.launch.world import find
from multigpu.strategies.ddp import DDPStrategy


class DDPSpawnStrategy(DDPStrategy):
    """All of DDPStrategy's arguments. Under a launcher it is ddp: the ranks are there already.

    What is handed over must be picklable. The Trainer brings the weights, the metrics and the callbacks' states back.
    """

    name = "ddp_spawn"

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Rank 0's result, from new processes. Raises RuntimeError with the traceback of the rank that failed first."""
        if find().launcher != "python":
            return function(*args)
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise UserError(
                f"strategy {self.name!r} imports this script again in each rank, and it trains there, too: put what it runs under "
                f"`if __name__ == '__main__':`.",
                already_reported=not multiprocessing.current_process().name.endswith("-1"),
            )
        processes = self.ranks_on_node() or 1
        if self.num_nodes > 1:
            raise UserError(
                f"strategy {self.name!r} starts processes on this machine, and num_nodes is {self.num_nodes}: use 'ddp' under torchrun or srun."
            )
        return launch.call(_from_rank_zero, processes, function, args)[0]

    @property
    def returns_by_value(self) -> bool:
        """Does `launch` train copies in other processes, so that results must be brought back?"""
        return find().launcher == "python"


class DDPNotebookStrategy(DDPSpawnStrategy):
    """The name for notebooks: what ddp_spawn does works there, too."""

    name = "ddp_notebook"


def _from_rank_zero(function: Callable[..., Any], args: tuple) -> Any:
    result = function(*args)
    return result if find().rank == 0 else None
