"""What runs inside the program's own processes: it records each step, and ends the program.

Python imports this module at its start, in every process of a run: it imports little.
"""

from multigpu.virtual import after_torch


def watch() -> None:
    """Record what this process trains, from its import of torch on."""
    after_torch.call(_start)


def _start() -> None:
    from multigpu.prove.inside import recorder, rounding, where
    from multigpu.prove.settings import from_environment

    settings = from_environment()
    recorder.start(settings)
    rounding.start(settings)
    where.start(settings)
