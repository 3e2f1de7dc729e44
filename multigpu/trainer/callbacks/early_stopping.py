"""EarlyStopping: stop training when the monitored metric no longer improves."""

from typing import Any

import torch
from torch import Tensor

from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.callbacks.monitor import (
    IS_BETTER,
    WORST,
    check_mode,
    missing_metric,
    to_score,
)
from multigpu.trainer.refused import refuse_arguments

# The attributes that a checkpoint contains, with Lightning's names.
STATE = ("wait_count", "stopped_epoch", "best_score", "patience")


class EarlyStopping(Callback):
    """Stop training after `patience` checks without an improvement of more than `min_delta`.

    The metric is checked after every validation or, with `check_on_train_epoch_end`, at the
    end of every training epoch. By default it is checked at the end of the epoch if validation
    runs once per epoch. With `check_finite`, training stops at once if the metric is not
    finite. If one rank decides to stop, all ranks stop.

    Raises UserError for an unknown mode and, with `strict`, for a metric that is not logged.
    """

    monitors = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        check_on_train_epoch_end: bool | None = None,
        **refused: Any,
    ):
        refuse_arguments("EarlyStopping", refused)
        self.monitor = monitor
        self.mode = check_mode(mode, "EarlyStopping")
        self.min_delta = min_delta if mode == "max" else -min_delta
        self.patience = patience
        self.verbose = verbose
        self.strict = strict
        self.check_finite = check_finite
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self.best_score = torch.tensor(WORST[mode])
        self.wait_count = 0
        self.stopped_epoch = 0

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state_dict[name])
        self.best_score = to_score(self.best_score)

    def setup(self, trainer, pl_module, stage):
        if self._check_on_train_epoch_end is None:
            once_per_epoch = trainer.val_check_interval == 1.0
            every_epoch = trainer.check_val_every_n_epoch == 1
            self._check_on_train_epoch_end = once_per_epoch and every_epoch

    def on_train_epoch_end(self, trainer, pl_module):
        if self._check_on_train_epoch_end:
            self._check(trainer)

    def on_validation_end(self, trainer, pl_module):
        if not self._check_on_train_epoch_end:
            self._check(trainer)

    def _check(self, trainer: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
            return
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            if self.strict:
                raise missing_metric(self.monitor, trainer.callback_metrics, "EarlyStopping")
            return
        current = to_score(value)
        best = self.best_score
        reason = self._reason_to_stop(current)
        stop = trainer.strategy.reduce_boolean_decision(bool(reason), all=False)
        trainer.should_stop = trainer.should_stop or stop
        if stop:
            self.stopped_epoch = trainer.current_epoch
        if self.verbose and (reason or self.wait_count == 0):
            rank = f"[rank: {trainer.global_rank}] " if trainer.world_size > 1 else ""
            result = f"{reason}: training stops" if reason else "the best so far"
            print(f"{rank}{self.monitor} = {current:.3f} (the best was {best:.3f}): {result}.")

    def _reason_to_stop(self, current: Tensor) -> str:
        """Why training stops; "" if it goes on. Updates best_score and wait_count."""
        if self.check_finite and not torch.isfinite(current):
            return "not finite"
        if IS_BETTER[self.mode](current - self.min_delta, self.best_score):
            self.best_score = current
            self.wait_count = 0
            return ""
        self.wait_count += 1
        if self.wait_count < self.patience:
            return ""
        return f"no improvement in the last {self.wait_count} checks"
