"""Interrupts of a cell wait for the end of an import, which must not be left half done."""

import signal
import threading
import time
from types import FrameType

SECONDS_IN_IMPORT = 20.0  # an import that takes longer hangs, or runs an experiment
POLL_INTERVAL = 0.1


class DeferredInterrupt:
    """A handler of SIGINT: raise KeyboardInterrupt, but not while a module is imported.

    An interrupted `import torch` leaves modules without some of their names; the next import
    then fails with an error that only a new kernel mends.
    """

    def __init__(self) -> None:
        self.first_at = 0.0  # the time of the interrupt that waits; 0 if none does

    def install(self, *_: object) -> None:
        """Handle SIGINT from now on. IPython calls it before each cell, with the cell."""
        self.first_at = 0.0
        signal.signal(signal.SIGINT, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.first_at = self.first_at or time.monotonic()
        waited = time.monotonic() - self.first_at
        if _imports(frame) and waited < SECONDS_IN_IMPORT:
            main = threading.main_thread().ident
            again = threading.Timer(POLL_INTERVAL, signal.pthread_kill, [main, number])
            again.daemon = True
            again.start()
            return
        self.first_at = 0.0
        raise KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


deferred = DeferredInterrupt()
