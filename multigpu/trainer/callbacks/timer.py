"""How does a run end before its job's time limit? The Timer stops it, for Trainer(max_time=...)."""

import re
import time
from datetime import timedelta
from typing import Any

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback

STAGES = ("train", "sanity_check", "validate", "test", "predict")


class Timer(Callback):
    """Stop training after `duration`, and know how long each stage took.

    `duration` is a timedelta, a dict of timedelta's arguments, "DD:HH:MM:SS", or None for no limit.
    It is looked at after every step or every epoch (`interval`). A resumed run counts the time before, too.
    Raises UserError for anything else.
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ):
        if interval not in ("step", "epoch"):
            raise UserError(
                f"Timer(interval={interval!r}): the interval is 'step' or 'epoch'."
            )
        self._duration, self._interval, self._verbose = _seconds(duration), interval, verbose
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._offset = 0.0

    def start_time(self, stage: str = "train") -> float | None:
        """When the stage began, in seconds of time.monotonic(); None if it did not."""
        return self._start.get(_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """When the stage ended, in seconds of time.monotonic(); None if it did not."""
        return self._end.get(_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """The seconds of a stage so far. Those of training count the runs that this one resumes."""
        start, end = self.start_time(stage), self.end_time(stage)
        spent = 0.0 if start is None else (time.monotonic() if end is None else end) - start
        return spent + (self._offset if stage == "train" else 0.0)

    def time_remaining(self, stage: str = "train") -> float | None:
        """The seconds left, below zero when they are over; None without a limit."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._offset = state_dict.get("time_elapsed", {}).get("train", 0.0)

    def _begin(self, stage: str) -> None:
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)  # a second fit begins anew

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer)  # a resumed run may have no time left

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin("train")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end["train"] = time.monotonic()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._end["validate"] = time.monotonic()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._end["test"] = time.monotonic()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._interval == "epoch":
            self._check(trainer)

    def _check(self, trainer: Any) -> None:
        if self._duration is None:
            return
        # Clocks differ: rank 0's decides, or some ranks would wait in the next step for those that stopped.
        stop = trainer.strategy.broadcast(self.time_elapsed() >= self._duration)
        trainer.should_stop = trainer.should_stop or stop
        if stop and self._verbose:
            trainer.print(
                f"The time limit is reached after {timedelta(seconds=int(self.time_elapsed()))}: training stops."
            )


def _stage(stage: str) -> str:
    if stage not in STAGES:
        raise UserError(
            f"Timer: there is no stage {stage!r}; the stages are {', '.join(STAGES)}."
        )
    return stage


def _seconds(duration: str | timedelta | dict[str, int] | None) -> float | None:
    if isinstance(duration, str):
        found = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())
        if not found:
            raise UserError(
                f"Timer(duration={duration!r}): a text says days:hours:minutes:seconds, as in '00:12:00:00'."
            )
        duration = dict(
            zip(("days", "hours", "minutes", "seconds"), map(int, found.groups()), strict=True)
        )
    if isinstance(duration, dict):
        try:
            duration = timedelta(**duration)
        except TypeError as error:
            raise UserError(
                f"Timer(duration={duration!r}) is not what timedelta takes ({error})."
            ) from None
    if duration is not None and not isinstance(duration, timedelta):
        raise UserError(
            f"Timer(duration={duration!r}): give a timedelta, a dict of its arguments, or 'DD:HH:MM:SS'."
        )
    return None if duration is None else duration.total_seconds()
