"""What in torch has to behave differently while virtual GPUs run, and is put back when they stop?"""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.vgpu.patches import comm, engine, generators, moving, pinned
from multigpu.vgpu.sim.clock import Clock
from multigpu.vgpu.sim.machine import Machine

_undo: list[Any] = []


def install(machine: Machine) -> None:
    """Set torch up for the machine that has just been started."""
    _undo.append(moving.install())
    _undo.append(engine.install())
    _undo.append(pinned.install())
    _undo.append(generators.install())
    # DataParallel's copies, and process groups, for this device.
    _undo.append(comm.install())
    if torch.distributed.is_available():
        from multigpu.vgpu.patches import process_group

        process_group.register()
    _undo.append(_tell_updates(machine.clock))


def _tell_updates(clock: Clock) -> Callable[[], None]:
    """The clock tells an optimizer's step from the rest. Torch's hooks for steps do not run when a step raises.

    So this stands around the step where torch's profiler does.
    """
    profiler = torch.autograd.profiler
    theirs = profiler.record_function

    class Recorded(theirs):
        def __enter__(self) -> Any:
            self.step, self.before = self.name.startswith("Optimizer.step#"), clock.updating
            clock.updating |= self.step
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            clock.updating = self.before if self.step else clock.updating
            super().__exit__(*error)

    profiler.record_function = Recorded
    return lambda: setattr(profiler, "record_function", theirs)


def remove() -> None:
    """Put everything back."""
    while _undo:
        _undo.pop()()
