"""What `trainer.fit_loop` has in Lightning: the limits of training, and its counters."""

from typing import TYPE_CHECKING, Any

from multigpu.trainer.loops.limits import reason_to_stop

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class FitLoopNames:
    """Has the counters below; other names, such as max_epochs, are the Trainer's."""

    def __init__(self, trainer: "Trainer"):
        self.__dict__["_trainer"] = trainer

    @property
    def done(self) -> bool:
        """Whether training would end now."""
        return bool(reason_to_stop(self._trainer))

    @property
    def batch_idx(self) -> int:
        """The index of the running batch in its epoch; -1 before the first."""
        loop = self._trainer.state.fit_loop
        return -1 if loop is None else loop.batches_done - 1

    @property
    def total_batch_idx(self) -> int:
        """The index of the running batch, counted over all epochs; -1 before the first."""
        loop = self._trainer.state.fit_loop
        return -1 if loop is None else loop.total_batches - 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)
