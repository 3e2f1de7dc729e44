"""Records a SIGTERM during training: after the batch, all ranks save a checkpoint and stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Sigterm:
    """Records a SIGTERM. A second SIGTERM ends the process as usual.

    received   1 after a SIGTERM, else 0; not a bool, because all_reduce_max takes integers
    """

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """A context in which a SIGTERM sets `received`.

        Python allows signal handlers only in the main thread: in other threads, this context
        does nothing.
        """
        self.received = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGTERM)
        previous = signal.SIG_DFL if previous is None else previous

        def set_flag(number: int, frame: object) -> None:
            self.received = 1
            signal.signal(signal.SIGTERM, previous)

        signal.signal(signal.SIGTERM, set_flag)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)
