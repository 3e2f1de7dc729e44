"""How far is the run? A bar on a terminal; one line an epoch in a log, which would keep every state of a bar."""

import builtins
import math
import sys
import time
from typing import Any

from multigpu.trainer.callbacks.callback import Callback

EVERY_SECONDS = 0.1  # nobody reads faster, and drawing a bar costs more than a small step


class ProgressBar(Callback):
    """What every progress bar has: `enable`, `disable`, `print` and `get_metrics`. A subclass draws."""

    def __init__(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """What the bar shows beside itself: the metrics logged with prog_bar=True."""
        return dict(trainer.progress_bar_metrics)

    def print(self, *args: Any, **kwargs: Any) -> None:
        builtins.print(*args, **kwargs)


class TQDMProgressBar(ProgressBar):
    """A tqdm bar for every epoch, validation, test and prediction on a terminal; elsewhere a line for every epoch.

    The bar is drawn at most every `refresh_rate` batches (0: never) and ten times a second. `leave` keeps the bars
    of all epochs on the screen, otherwise the last one stays. Only rank 0 draws.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False):
        super().__init__()
        self.refresh_rate, self.process_position, self._leave = (
            refresh_rate,
            process_position,
            leave,
        )
        self._bar: Any = None  # tqdm's, while a loop runs
        self._next, self._done = 0.0, 0

    @property
    def is_enabled(self) -> bool:
        return self._enabled and self.refresh_rate > 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_bar": None}  # a bar cannot be pickled

    def print(
        self, *args: Any, sep: str = " ", end: str = "\n", file: Any = None, **kwargs: Any
    ) -> None:
        """print() that moves the bar out of the way."""
        if self._bar is None:
            builtins.print(*args, sep=sep, end=end, file=file, **kwargs)
        else:
            self._bar.write(sep.join(map(str, args)), end=end, file=file)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._open(f"Epoch {trainer.current_epoch}", trainer.num_training_batches)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._bar is not None:
            self._draw(trainer, pl_module)
        elif self.is_enabled and not sys.stdout.isatty():
            metrics = "".join(
                f"  {name} {_short(v)}"
                for name, v in self.get_metrics(trainer, pl_module).items()
            )
            builtins.print(
                f"epoch {trainer.current_epoch}  step {trainer.global_step}{metrics}",
                flush=True,
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close(leave=True)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._open("Validation", trainer.num_val_batches)
        elif (
            self._bar is not None
        ):  # within training the epoch's bar stays, and says what takes the time
            self._bar.set_description(f"Epoch {trainer.current_epoch}, validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "validate":
            self._close(leave=True)
        elif self._bar is not None:
            self._bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._open("Testing", trainer.num_test_batches)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._open("Predicting", trainer.num_predict_batches)

    def on_test_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn != "fit":
            self._step(trainer, pl_module)

    on_validation_batch_end = on_predict_batch_end = on_test_batch_end

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._close(leave=True)

    on_predict_end = on_test_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(leave=True)

    def _open(self, what: str, batches: float | list[float]) -> None:
        self._close(leave=self._leave)
        if not (self.is_enabled and sys.stdout.isatty()):
            return
        from tqdm import tqdm

        total, self._done, self._next = (
            (sum(batches) if isinstance(batches, list) else batches),
            0,
            0.0,
        )
        self._bar = tqdm(
            desc=what,
            total=None if math.isinf(total) else int(total),
            position=self.process_position,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
        )

    def _step(self, trainer: Any, pl_module: Any) -> None:
        """One more batch: draw if it is time. This runs at every step, so it does little."""
        if self._bar is None:
            return
        self._done += 1
        due = self._done % self.refresh_rate == 0 and time.monotonic() >= self._next
        if due or self._done == self._bar.total:
            self._draw(trainer, pl_module)

    def _draw(self, trainer: Any, pl_module: Any) -> None:
        metrics = self.get_metrics(trainer, pl_module)
        self._bar.n = self._done
        self._bar.set_postfix_str(
            ", ".join(f"{name}={_short(v)}" for name, v in metrics.items()), refresh=False
        )
        self._bar.refresh()
        self._next = time.monotonic() + EVERY_SECONDS

    def _close(self, leave: bool) -> None:
        if self._bar is not None:
            self._bar.leave = leave
            self._bar.close()
            self._bar = None


def _short(value: Any) -> str:
    """A metric in four digits or so; what is no number as it is."""
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)
