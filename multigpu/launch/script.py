"""Start a lesson's script in this process, which a launcher may have started."""

import argparse
from collections.abc import Callable
from typing import NoReturn

from multigpu.errors import UserError
from multigpu.files import set_aside_results
from multigpu.launch.exit import exit_code, exit_process, keep, report_exit_code
from multigpu.launch.spawning import hide_spawn_warnings, outer_world
from multigpu.launch.world import World, is_rank_zero


def start(main: Callable[..., None], args: argparse.Namespace) -> NoReturn:
    """Run `main(args)`, then end this process: `start` does not return.

    A new run sets the results in `args.out` aside. The exit code is 0, or 2 after a UserError
    (its text is printed), or 130 after Ctrl-C. Any other exception is raised, and torchrun
    records its traceback.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    hide_spawn_warnings()
    try:
        new_run = getattr(args, "out", None) and getattr(args, "resume", None) is None
        if new_run and is_rank_zero():
            set_aside_results(args.out)
        code = record(exit_code)(main, args)
    except (UserError, KeyboardInterrupt, SystemExit) as error:
        keep(error)
        code = _code_of(error)
    exit_process(code)


def _code_of(error: BaseException) -> int:
    if isinstance(error, UserError):
        return report_exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def single_process_world(stem: str) -> World:
    """The world of a script that runs as one process.

    Raises UserError if a launcher started several processes of the script.
    """
    outer = outer_world()
    if outer.size > 1:
        raise UserError(
            f"{stem} is one process, and {outer.launcher} started {outer.size}, which would "
            f"all do the same: start it with `python scripts/{stem}.py`, or as one task.",
            already_reported=outer.rank != 0,
        )
    return outer
