"""ddp_spawn and ddp_notebook: ddp in new processes that run a function instead of a script.

The function is sent by value (cloudpickle), so it can be defined in a notebook's cell. The
processes are not forked, so this process can use CUDA before it starts them. This process does
not train; the new processes send their results to it.
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
    """ddp in processes that `launch` starts. It accepts DDPStrategy's arguments.

    Under a launcher it is the same as ddp, because the ranks run already. The function and its
    arguments must be picklable. The Trainer copies the weights, the metrics and the callbacks'
    states back to this process.
    """

    name = "ddp_spawn"

    def launch(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run the function in new processes. Returns rank 0's result.

        Raises RuntimeError with the traceback of the rank that failed first.
        """
        if find_world().launcher != "python":
            return function(*args)
        process = multiprocessing.current_process()
        if getattr(process, "_inheriting", False):
            raise UserError(
                f"strategy {self.name!r} imports this script again in each rank, so the "
                f"script would train there, too: put the code that trains under "
                f"`if __name__ == '__main__':`.",
                already_reported=not process.name.endswith("-1"),
            )
        if self.num_nodes > 1:
            raise UserError(
                f"strategy {self.name!r} starts processes on this machine only, but "
                f"num_nodes is {self.num_nodes}: use 'ddp' under torchrun or srun."
            )
        processes = self.ranks_on_node() or 1
        return launch.call(_result_of_rank_zero, processes, function, args)[0]

    @property
    def trains_in_other_processes(self) -> bool:
        """True if `launch` trains in other processes, whose results must be sent back."""
        return find_world().launcher == "python"


class DDPNotebookStrategy(DDPSpawnStrategy):
    """ddp_spawn, with Lightning's name for notebooks. ddp_spawn works in notebooks, too."""

    name = "ddp_notebook"


def _result_of_rank_zero(function: Callable[..., Result], args: tuple) -> Result | None:
    result = function(*args)
    return result if find_world().rank == 0 else None
