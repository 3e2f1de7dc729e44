"""Timer: stop training at a time limit. Trainer(max_time=...) adds a Timer."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer

STAGES = ("train", "sanity_check", "validate", "test", "predict")


class Timer(Callback):
    """Stop training after `duration`, and measure how long each stage takes.

    `duration` is a timedelta, a dict of timedelta's arguments, "DD:HH:MM:SS", or None for no
    limit. The limit is checked after every step or every epoch (`interval`). A resumed run
    also counts the time of the earlier runs. Raises UserError for other arguments.
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ):
        if interval not in ("step", "epoch"):
            raise UserError(f"Timer(interval={interval!r}): expected 'step' or 'epoch'.")
        self._duration = to_seconds(duration, "Timer(duration")
        self._interval = interval
        self._verbose = verbose
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        # Seconds of training in earlier runs, if this run is resumed.
        self._offset = 0.0

    def start_time(self, stage: str = "train") -> float | None:
        """When the stage began, in seconds of time.monotonic(); None if it has not begun."""
        return self._start.get(_check_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """When the stage ended, in seconds of time.monotonic(); None if it has not ended."""
        return self._end.get(_check_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """The seconds of a stage so far. For training, they include the earlier runs."""
        start = self.start_time(stage)
        end = self.end_time(stage)
        seconds = self._offset if stage == "train" else 0.0
        if start is None:
            return seconds
        return seconds + (time.monotonic() if end is None else end) - start

    def time_remaining(self, stage: str = "train") -> float | None:
        """The seconds left, negative after the limit; None without a limit."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._offset = state_dict.get("time_elapsed", {}).get("train", 0.0)

    def _start_stage(self, stage: str) -> None:
        self._start[stage] = time.monotonic()
        # If the stage runs again, only the new run is measured.
        self._end.pop(stage, None)

    def _end_stage(self, stage: str) -> None:
        self._end[stage] = time.monotonic()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A resumed run may have no time left.
        self._check_time(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_stage("train")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_stage("train")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_stage("validate")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_stage("validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_stage("test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_stage("test")

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._interval == "step":
            # Lightning's strategies, with which this callback works too, lack the attribute.
            together = getattr(trainer.strategy, "ranks_step_together", True)
            self._check_time(trainer, together)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._interval == "epoch":
            self._check_time(trainer)

    def _check_time(self, trainer: Trainer, together: bool = True) -> None:
        """together   False: no rank waits for rank 0, and the Trainer lets the ranks agree."""
        if self._duration is None:
            return
        stop = self.time_elapsed() >= self._duration
        if together:
            # Rank 0 decides, because clocks differ: if each rank used its own clock, some
            # ranks could stop while the others wait for them in the next step.
            stop = trainer.strategy.broadcast(stop)
        trainer.should_stop = trainer.should_stop or stop
        if stop and self._verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            trainer.print(f"The time limit is reached after {elapsed}: training stops.")


def _check_stage(stage: str) -> str:
    if stage not in STAGES:
        raise UserError(f"Timer has no stage {stage!r}; the stages are {', '.join(STAGES)}.")
    return stage


def to_seconds(duration: str | timedelta | dict[str, int] | None, name: str) -> float | None:
    """The duration in seconds; None for None. Timer describes what it can be.

    name   what messages call it, as in "Timer(duration"
    """
    if duration is None:
        return None
    if isinstance(duration, str):
        match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())
        if not match:
            raise UserError(
                f"{name}={duration!r}): write days:hours:minutes:seconds, as in '00:12:00:00'."
            )
        units = ("days", "hours", "minutes", "seconds")
        duration = dict(zip(units, map(int, match.groups()), strict=True))
    if isinstance(duration, dict):
        try:
            duration = timedelta(**duration)
        except TypeError as error:
            raise UserError(
                f"{name}={duration!r}): timedelta does not accept this ({error})."
            ) from None
    if not isinstance(duration, timedelta):
        raise UserError(
            f"{name}={duration!r}): "
            "give a timedelta, a dict of timedelta's arguments, or 'DD:HH:MM:SS'."
        )
    return duration.total_seconds()
