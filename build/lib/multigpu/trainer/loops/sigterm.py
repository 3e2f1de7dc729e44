"""Handles SIGTERM during training: after the batch, all ranks save a checkpoint and stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


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


def save_and_interrupt(trainer: "Trainer") -> None:
    """Save a checkpoint, and end training after this batch. All ranks must call it."""
    saver = trainer.checkpoint_callback
    folder = (saver.dirpath if saver else None) or trainer.default_root_dir
    path = Path(folder) / "stopped.ckpt"
    trainer.save_checkpoint(path)
    trainer.print(
        f"stopped by SIGTERM after step {trainer.global_step}: "
        f"resume with trainer.fit(model, ckpt_path={str(path)!r})"
    )
    trainer.state.interrupted = True
