"""Progress bars: tqdm on a terminal, one line per epoch if the output goes to a file.

In a file, every state of a bar would remain.
"""

from __future__ import annotations

import builtins
import importlib.util
import math
import sys
from typing import TYPE_CHECKING, Any

from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.refused import refuse_arguments

if TYPE_CHECKING:
    from tqdm import tqdm

    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer


class TQDMProgressBar(Callback):
    """Draw one tqdm bar per training epoch, on rank 0.

    If the output is not a terminal, or tqdm is not installed, one line per epoch is printed
    instead. The bar is drawn every `refresh_rate` batches (0: never), but at most ten times
    per second. With `leave` the bars of all epochs stay on the screen, else the last one.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False, **refused: Any):
        refuse_arguments("TQDMProgressBar", refused)
        self.refresh_rate = refresh_rate
        self._leave = leave
        self._bar: tqdm | None = None  # None while no loop runs

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_bar": None}  # a bar cannot be pickled

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The metrics that the bar shows: those logged with prog_bar=True."""
        return dict(trainer.progress_bar_metrics)

    def print(
        self, *args: Any, sep: str = " ", end: str = "\n", file: Any = None, **kwargs: Any
    ) -> None:
        """Print above the bar, like print()."""
        if self._bar is None:
            builtins.print(*args, sep=sep, end=end, file=file, **kwargs)
        else:
            self._bar.write(sep.join(map(str, args)), end=end, file=file)

    # ---- training -------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer, pl_module):
        self._open(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self._bar is not None and self._bar.update():  # it has drawn the bar
            self._show_metrics(trainer, pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        if self._bar is not None:
            self._show_metrics(trainer, pl_module)
        elif self.refresh_rate and trainer.is_global_zero and not _can_draw():
            metrics = self.get_metrics(trainer, pl_module)
            fields = [f"epoch {trainer.current_epoch}", f"step {trainer.global_step}"]
            fields += [f"{name} {_short(value)}" for name, value in metrics.items()]
            builtins.print("  ".join(fields), flush=True)

    def on_train_end(self, trainer, pl_module):
        self._close()

    def on_exception(self, trainer, pl_module, exception):
        self._close()

    # ---- the bar ----------------------------------------------------------------------------

    def _open(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.leave = self._leave  # else the next bar takes its line
        self._close()
        if not (self.refresh_rate and trainer.is_global_zero and _can_draw()):
            return
        from tqdm import tqdm

        batches = trainer.num_training_batches
        self._bar = tqdm(
            desc=f"Epoch {trainer.current_epoch}",
            total=None if math.isinf(batches) else int(batches),
            dynamic_ncols=True,
            file=sys.stdout,
            miniters=self.refresh_rate,
            mininterval=0.1,  # seconds, because drawing takes longer than a small step
        )

    def _show_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = self.get_metrics(trainer, pl_module)
        self._bar.set_postfix_str(", ".join(f"{k}={_short(v)}" for k, v in metrics.items()))

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _can_draw() -> bool:
    """Whether stdout is a terminal, and tqdm is installed."""
    return sys.stdout.isatty() and importlib.util.find_spec("tqdm") is not None


def _short(value: Any) -> str:
    """A number with four significant digits; other values as text."""
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)
