"""What happens on SIGTERM? The handler only sets a flag; the ranks agree on it between two steps, save, and leave."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Signals:
    """asked: a SIGTERM has come (1) or not (0). A second one ends the process as usual."""

    def __init__(self) -> None:
        self.asked = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """SIGTERM sets the flag in here. In a thread other than the main one, Python allows no handler: then nothing changes."""
        self.asked = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: object) -> None:
            self.asked = 1
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)

        signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)

    @staticmethod
    def stop(trainer: Any) -> None:
        """All ranks have agreed that a SIGTERM came: save, and leave after this step."""
        saver = trainer.checkpoint_callback
        path = (
            Path((saver.dirpath if saver else None) or trainer.default_root_dir)
            / "stopped.ckpt"
        )
        trainer.save_checkpoint(path)
        trainer.print(
            f"stopped by SIGTERM after step {trainer.global_step}: go on with trainer.fit(model, ckpt_path={str(path)!r})"
        )
        trainer.interrupted = True
