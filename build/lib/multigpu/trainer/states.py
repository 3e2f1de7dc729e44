"""What a Trainer is doing, with Lightning's names. Each value also equals its text."""

from enum import StrEnum


class TrainerStatus(StrEnum):
    """Whether a run is going on, and how the last one ended."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(StrEnum):
    """The Trainer's method that runs, or ran last."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """The part of a run: a fit also validates."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        return self in (
            RunningStage.VALIDATING,
            RunningStage.TESTING,
            RunningStage.SANITY_CHECKING,
        )

    @property
    def dataloader_prefix(self) -> str:
        """The stage's part of the name val_dataloader."""
        validates = (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING)
        return "val" if self in validates else self.value


# A run of this method begins with this stage.
FIRST_STAGE = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}
