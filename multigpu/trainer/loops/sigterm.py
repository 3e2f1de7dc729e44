"""SIGTERM during training: a handler sets a flag; after the step the ranks save and stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class Sigterm:
    """received: 1 after a SIGTERM, else 0; a number, because the ranks take its maximum.

    A second SIGTERM ends the process as usual.
    """

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Within it, a SIGTERM sets the flag.

        Python allows handlers in the main thread only: elsewhere nothing changes.
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
    """On all ranks: save a checkpoint, and end training after this step."""
    saver = trainer.checkpoint_callback
    folder = (saver.dirpath if saver else None) or trainer.default_root_dir
    path = Path(folder) / "stopped.ckpt"
    trainer.save_checkpoint(path)
    trainer.print(
        f"stopped by SIGTERM after step {trainer.global_step}: "
        f"go on with trainer.fit(model, ckpt_path={str(path)!r})"
    )
    trainer.state.interrupted = True
