"""ddp_spawn and ddp_notebook: ddp in new processes that run a function instead of a script.

The function is sent by value (cloudpickle), so it may be defined in a notebook's cell. No
process is forked, so CUDA may have been used before. This process does not train: the results
are sent back to it.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any, TypeVar

from multigpu import launch
from multigpu.errors import UserError
from multigpu.launch.world import find_world
from multigpu.strategies.ddp import DDPStrategy

Result = TypeVar("Result")


class DDPSpawnStrategy(DDPStrategy):
    """Takes DDPStrategy's arguments. Under a launcher it is ddp: the ranks run already.

    The function and its arguments must be picklable. The Trainer brings back the weights, the
    metrics and the callbacks' states.
    """

    name = "ddp_spawn"

    def launch(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run the function in new processes; returns rank 0's result.

        Raises RuntimeError with the traceback of the rank that failed first.
        """
        if find_world().launcher != "python":
            return function(*args)
        process = multiprocessing.current_process()
        if getattr(process, "_inheriting", False):
            raise UserError(
                f"strategy {self.name!r} imports this script again in each rank, and it "
                f"trains there, too: put what it runs under `if __name__ == '__main__':`.",
                already_reported=not process.name.endswith("-1"),
            )
        if self.num_nodes > 1:
            raise UserError(
                f"strategy {self.name!r} starts processes on this machine, and num_nodes is "
                f"{self.num_nodes}: use 'ddp' under torchrun or srun."
            )
        processes = self.ranks_on_node() or 1
        return launch.call(_result_of_rank_zero, processes, function, args)[0]

    @property
    def trains_in_other_processes(self) -> bool:
        """True if `launch` trains in other processes, whose results must be sent back."""
        return find_world().launcher == "python"


class DDPNotebookStrategy(DDPSpawnStrategy):
    """Lightning's name for notebooks. ddp_spawn works there, too."""

    name = "ddp_notebook"


def _result_of_rank_zero(function: Callable[..., Result], args: tuple) -> Result | None:
    result = function(*args)
    return result if find_world().rank == 0 else None
