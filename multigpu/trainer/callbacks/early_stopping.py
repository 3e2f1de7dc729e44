"""When has a run learned enough? When the metric that it watches did not improve for a while."""

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.callbacks.monitor import BETTER, WORST, checked_mode, missing, score


class EarlyStoppingReason(Enum):
    """Why training was stopped; the numbers are Lightning's, since checkpoints hold them."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Stop training after `patience` checks without an improvement of more than `min_delta`.

    A check stands after every validation, or at the end of every training epoch (`check_on_train_epoch_end`; by
    default the latter, where validation runs once an epoch). A metric better than `stopping_threshold`, worse than
    `divergence_threshold`, or (`check_finite`) not finite stops at once. All ranks stop if one of them would.
    Raises UserError for an unknown mode and, with `strict`, for a metric that nobody logged.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ):
        self.monitor, self.patience, self.verbose, self.strict = (
            monitor,
            patience,
            verbose,
            strict,
        )
        self.mode = checked_mode(mode, "EarlyStopping")
        self.min_delta = min_delta if mode == "max" else -min_delta
        self.check_finite, self.log_rank_zero_only = check_finite, log_rank_zero_only
        self.stopping_threshold, self.divergence_threshold = (
            stopping_threshold,
            divergence_threshold,
        )
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self.best_score = torch.tensor(WORST[mode])
        self.wait_count = self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        names = (
            "wait_count",
            "stopped_epoch",
            "best_score",
            "patience",
            "stopping_reason_message",
        )
        return {name: getattr(self, name) for name in names} | {
            "stopping_reason": self.stopping_reason.value
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in ("wait_count", "stopped_epoch", "patience"):
            setattr(self, name, state_dict[name])
        self.best_score = score(state_dict["best_score"])
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._check_on_train_epoch_end is None:
            self._check_on_train_epoch_end = (
                trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._check_on_train_epoch_end:
            self._check(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._check_on_train_epoch_end:
            self._check(trainer)

    def _check(self, trainer: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
            return
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            if self.strict:
                raise missing(self.monitor, trainer.callback_metrics, "EarlyStopping")
            return
        stop, message = self._judge(score(value))
        stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
        trainer.should_stop = trainer.should_stop or stop
        if stop:
            self.stopped_epoch, self.stopping_reason_message = trainer.current_epoch, message
        if message and self.verbose:
            if self.log_rank_zero_only or trainer.world_size == 1:
                trainer.print(message)
            else:
                print(f"[rank: {trainer.global_rank}] {message}")

    def _judge(self, current: Tensor) -> tuple[bool, str | None]:
        """Whether to stop, and what to say about it. A metric that does not improve has nothing to say."""
        better, what, reason = (
            BETTER[self.mode],
            f"{self.monitor} = {current:.3f}",
            EarlyStoppingReason,
        )
        stop, divergence = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not torch.isfinite(current):
            self.stopping_reason = reason.NON_FINITE_METRIC
            return (
                True,
                f"{what} is not finite (the best was {self.best_score:.3f}): training stops.",
            )
        if stop is not None and better(current, stop):
            self.stopping_reason = reason.STOPPING_THRESHOLD
            return True, f"{what} has passed the stopping threshold {stop}: training stops."
        if divergence is not None and better(-current, -divergence):
            self.stopping_reason = reason.DIVERGENCE_THRESHOLD
            return (
                True,
                f"{what} has passed the divergence threshold {divergence}: training stops.",
            )
        if better(current - self.min_delta, self.best_score):
            before, self.best_score, self.wait_count = self.best_score, current, 0
            was = f" (the best was {before:.3f})" if torch.isfinite(before) else ""
            return False, f"{what} is the best so far{was}."
        self.wait_count += 1
        if self.wait_count < self.patience:
            return False, None
        self.stopping_reason = reason.PATIENCE_EXHAUSTED
        return (
            True,
            f"{what} is the last of {self.wait_count} without improvement (best {self.best_score:.3f}): training stops.",
        )
