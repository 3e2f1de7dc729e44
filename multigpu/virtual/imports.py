"""Acts right after a program's `import torch`, wherever that is.

Python imports this module at its start, in every process of a run: it imports little.
"""

import gc
import os
import shlex
import sys
from types import TracebackType

from multigpu.virtual import after_torch, packages


def watch() -> None:
    """Let torch find virtual GPUs from its import on.

    The packages that cannot run are refused before it, too: many programs import them first.
    """
    _say_torchrun()
    if "torch" in sys.modules:
        put_on()
        return
    refused = packages.Finder(_sees_gpus)
    sys.meta_path.insert(0, refused)

    def after() -> None:
        # put_on imports torch.utils.flop_counter, which would import triton in each process.
        # A CUDA build warns that it finds none.
        import logging

        refused.refuses_triton = True
        log = logging.getLogger("torch.utils.flop_counter")
        log.disabled = True
        put_on()
        log.disabled = False
        sys.meta_path.remove(refused)

    after_torch.call(after)


def _say_torchrun() -> None:
    """Let Python name torchrun below the traceback of a program that misses RANK and so on."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
        from multigpu.errors import needs_torchrun
        from multigpu.virtual.options import from_environment

        previous(kind, error, trace)
        if "RANK" not in os.environ and needs_torchrun(f"{kind.__name__}: {error}"):
            module = sys.modules["__main__"].__spec__  # None: a file
            words = ["-m", module.name] if module else sys.argv[:1]
            gpus = from_environment().gpus
            print(
                f"multigpu: the program needs torchrun, which sets RANK, LOCAL_RANK and "
                f"WORLD_SIZE: `multigpu virtual --gpus {gpus} torchrun "
                f"--nproc-per-node={gpus} {shlex.join(words + sys.argv[1:])}`.",
                file=sys.stderr,
            )

    sys.excepthook = hook


def _sees_gpus() -> bool:
    from multigpu.virtual.options import from_environment
    from multigpu.virtual.visible import visible_gpus

    return bool(visible_gpus(from_environment().gpus))


def put_on() -> None:
    """Start the virtual GPUs of this run in this process, and its record.

    A UserError ends the process: its sentence is printed, and the exit code is 2.
    """
    from multigpu.errors import UserError, report

    collects = gc.isenabled()
    # What is made here stays until the end. A collection meanwhile would look at all objects
    # of torch, which takes as long as all the rest of the start.
    gc.disable()
    try:
        _start()
    except UserError as error:
        report(error)
        raise SystemExit(2) from None
    finally:
        if collects:
            gc.enable()


def _start() -> None:
    """Start the GPUs that this process sees, share their memory, and begin its record."""
    from multigpu.errors import UserError
    from multigpu.launch.room import GIB, TORCH_RANK, available_memory
    from multigpu.virtual.options import from_environment
    from multigpu.virtual.visible import visible_gpus

    options = from_environment()
    visible = visible_gpus(options.gpus)
    if not visible:
        return
    memory = available_memory()
    if memory is not None and memory < TORCH_RANK:
        raise UserError(
            f"the host has {memory / GIB:.1f} GiB of memory left, too little for one more "
            f"process: start fewer ranks."
        )
    from multigpu.virtual import face, kinds, recorder, shared_memory
    from multigpu.virtual.sim import machine

    face.put_on(options.seen(visible))
    if (started := machine.running()) is not None:
        shared_memory.share(started.meters, visible)
    recorder.start(visible)
    kinds.watch(history=options.history)
    if started is not None and options.history:
        for meter in started.meters:
            meter.contents.history = []
    if options.measures_steps():
        from multigpu.virtual import steps

        steps.watch(options.steps)
