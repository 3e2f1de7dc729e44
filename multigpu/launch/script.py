"""How a lesson's script starts: in the processes of a launcher, in processes of its own (`--spawn`), or alone."""

import argparse
from collections.abc import Callable

from multigpu.errors import UserError
from multigpu.launch.exit import exit_code, leave, report
from multigpu.launch.spawning import hide_spawn_warnings, outer_world, spawn
from multigpu.launch.world import World


def start(main: Callable[..., None], args: argparse.Namespace) -> None:
    """Run `main(args)`: in `args.spawn` new processes if there is such a flag and it is given, else in this process.

    `args.spawn` is a number, or "auto": one process a GPU, or two on the CPU, the fewest that show anything.
    A UserError ends the process with its sentence and exit code 2; torchrun is given the traceback of any other fault.
    """
    from torch.cuda import device_count
    from torch.distributed.elastic.multiprocessing.errors import record

    hide_spawn_warnings()
    wanted = getattr(args, "spawn", None)
    try:
        if wanted is None:
            code = record(exit_code)(main, args)
        elif wanted != "auto" and not wanted.isdecimal():
            raise UserError(f"--spawn {wanted}: expected a number of processes, or 'auto'.")
        else:
            code = spawn(
                _ranked, device_count() or 2 if wanted == "auto" else int(wanted), main, args
            )
    except UserError as error:
        code = report(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    leave(code)


def alone(stem: str) -> World:
    """The world of a script that is one process. Raises UserError where a launcher has started several of it."""
    outer = outer_world()
    if outer.size > 1:
        raise UserError(
            f"{stem} is one process, and {outer.launcher} started {outer.size}, which would all do the same: "
            f"start it with `python scripts/{stem}.py`, or as one task.",
            already_reported=outer.rank != 0,
        )
    return outer


def _ranked(main: Callable[..., None], args: object) -> None:
    leave(exit_code(main, args))
