"""Progress bars: tqdm on a terminal, one line per epoch if the output goes to a file.

In a file, every state of a bar would remain.
"""

from __future__ import annotations

import builtins
import importlib.util
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from tqdm import tqdm

    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer

# The shortest time between two drawings, because drawing takes longer than a small step.
SECONDS_BETWEEN_DRAWINGS = 0.1


class ProgressBar(Callback):
    """The base class of progress bars: a subclass draws the bar."""

    def __init__(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the run. Raises UserError between runs."""
        if self._trainer is None:
            raise UserError(
                f"{type(self).__name__}.trainer is read outside of a run: read it in a hook."
            )
        return self._trainer

    def setup(self, trainer, pl_module, stage):
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The metrics that the bar shows: those logged with prog_bar=True."""
        return dict(trainer.progress_bar_metrics)

    def print(self, *args: Any, **kwargs: Any) -> None:
        builtins.print(*args, **kwargs)


class TQDMProgressBar(ProgressBar):
    """Draw one tqdm bar per epoch, validation, test and prediction.

    If the output is not a terminal, or tqdm is not installed, one line per epoch is printed
    instead. The bar is drawn every `refresh_rate` batches (0: never), but at most ten times
    per second. With `leave` the bars of all epochs stay on the screen, otherwise only the last
    one stays. Only rank 0 draws.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False):
        super().__init__()
        self.refresh_rate = refresh_rate
        self.process_position = process_position
        self._leave = leave
        self._bar: tqdm | None = None  # None while no loop runs
        self._batches_done = 0
        self._next_drawing = 0.0

    @property
    def is_enabled(self) -> bool:
        return self._enabled and self.refresh_rate > 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_bar": None}  # a bar cannot be pickled

    def print(
        self, *args: Any, sep: str = " ", end: str = "\n", file: Any = None, **kwargs: Any
    ) -> None:
        """Print above the bar, like print()."""
        if self._bar is None:
            builtins.print(*args, sep=sep, end=end, file=file, **kwargs)
        else:
            self._bar.write(sep.join(map(str, args)), end=end, file=file)

    def on_train_epoch_start(self, trainer, pl_module):
        self._open(trainer, f"Epoch {trainer.current_epoch}", "train")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._count_batch(trainer, pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        if self._bar is not None:
            self._draw(trainer, pl_module)
        elif self.is_enabled and not _can_draw():
            metrics = self.get_metrics(trainer, pl_module)
            fields = [f"epoch {trainer.current_epoch}", f"step {trainer.global_step}"]
            fields += [f"{name} {_short(value)}" for name, value in metrics.items()]
            builtins.print("  ".join(fields), flush=True)

    def on_train_end(self, trainer, pl_module):
        self._close(leave=True)

    def on_validation_start(self, trainer, pl_module):
        if trainer.state.fn == "validate":
            self._open(trainer, "Validation", "val")
        elif self._bar is not None:
            # During training the epoch's bar stays, and shows that a validation runs.
            self._bar.set_description(f"Epoch {trainer.current_epoch}, validation")

    def on_validation_end(self, trainer, pl_module):
        if trainer.state.fn == "validate":
            self._close(leave=True)
        elif self._bar is not None:
            self._bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_test_start(self, trainer, pl_module):
        self._open(trainer, "Testing", "test")

    def on_predict_start(self, trainer, pl_module):
        self._open(trainer, "Predicting", "predict")

    def on_test_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ):
        if trainer.state.fn != "fit":
            self._count_batch(trainer, pl_module)

    on_validation_batch_end = on_test_batch_end
    on_predict_batch_end = on_test_batch_end

    def on_test_end(self, trainer, pl_module):
        self._close(leave=True)

    on_predict_end = on_test_end

    def on_exception(self, trainer, pl_module, exception):
        self._close(leave=True)

    def _open(self, trainer: Trainer, description: str, name: str) -> None:
        self._close(leave=self._leave)
        if not (self.is_enabled and _can_draw()):
            return
        from tqdm import tqdm

        batches = trainer.state.num_batches.get(name, 0)
        total = sum(batches) if isinstance(batches, list) else batches
        self._batches_done = 0
        self._next_drawing = 0.0
        self._bar = tqdm(
            desc=description,
            total=None if math.isinf(total) else int(total),
            position=self.process_position,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
        )

    def _count_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count a batch; draw the bar if it is due. Every step calls this: keep it cheap."""
        if self._bar is None:
            return
        self._batches_done += 1
        every = self._batches_done % self.refresh_rate == 0
        due = every and time.monotonic() >= self._next_drawing
        if due or self._batches_done == self._bar.total:
            self._draw(trainer, pl_module)

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = self.get_metrics(trainer, pl_module)
        text = ", ".join(f"{name}={_short(value)}" for name, value in metrics.items())
        self._bar.n = self._batches_done
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.refresh()
        self._next_drawing = time.monotonic() + SECONDS_BETWEEN_DRAWINGS

    def _close(self, leave: bool) -> None:
        if self._bar is not None:
            self._bar.leave = leave
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
