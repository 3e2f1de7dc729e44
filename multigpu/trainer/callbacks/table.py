"""How does a run of the Trainer tell what every lesson tells? By a callback: a row an epoch, printed, kept, and resumed."""

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from multigpu import devices, metrics
from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback


class Table(Callback):
    """Prints where the run computes and a row an epoch; `rows` holds what metrics.report takes.

    args     of the lesson's parser: epochs, out, resume
    loaded   the checkpoint from which the run goes on, if any

    The module logs "loss" and "test_accuracy" by epoch; the data module has `train`, `batch_size`, the global one, and
    `share`, a rank's part of it. A checkpoint keeps the rows. Raises UserError once the loss is not finite.
    """

    def __init__(self, args: Namespace, loaded: Path | None = None):
        self.args, self.loaded, self.rows = args, loaded, []
        self.began = self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        world, digits = trainer.strategy.world, trainer.datamodule
        trainer.print(devices.describe(world, trainer.strategy.device))
        trainer.print(
            f"global batch {digits.batch_size} = {world.size} (ranks) × {digits.share} (images)\n"
        )
        at = {"epoch": trainer.current_epoch, "step": 0, "history": self.rows}
        trainer.print(metrics.opening(at, self.args, self.loaded, world), flush=True)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.seconds = time.perf_counter() - self.began  # the epoch's last step is done

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for name in ("loss", "test_accuracy"):
            if name not in trainer.callback_metrics:
                raise UserError(
                    f"the table of epochs wants {name!r}: call self.log({name!r}, …, on_epoch=True) in its step."
                )
        told = {
            name: float(trainer.callback_metrics[name]) for name in ("loss", "test_accuracy")
        }
        metrics.finite(told["loss"], trainer.current_epoch, trainer.strategy.world)
        speed = len(trainer.datamodule.train) / self.seconds
        self.rows.append({"epoch": trainer.current_epoch + 1, **told, "images_per_s": speed})
        trainer.print(metrics.row(self.rows[-1]), flush=True)
