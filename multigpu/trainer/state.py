"""What a Trainer knows about its runs: which goes on, how far training is, what was logged."""

import warnings
from dataclasses import dataclass, field
from typing import Any

from multigpu.launch.world import is_rank_zero
from multigpu.trainer.results import Metrics


@dataclass(slots=True)
class State:
    """The state of one Trainer. The names `fn`, `stage` and `finished` are Lightning's.

    fn             the method that runs or ran last: "fit", "validate", "test", "predict"; None
                   before the first run
    stage          the part of the run: "train", "sanity_check", "validate", "test", "predict";
                   None between runs
    finished       whether the last run ended without an exception
    should_stop    True ends training after this batch; users and callbacks set it
    current_epoch  completed epochs; during an epoch, this epoch's index from 0
    global_step    optimizer steps
    batches_that_stepped   batches that ended with an optimizer step: the loggers' x axis
    num_batches    this rank's batches by "train", "val", "test", "predict": an epoch's, or a
                   list for several dataloaders; infinity without a length
    loaders        the user's dataloaders by the same names; "train": this rank's shard
    ckpt_path      the checkpoint that the last run loaded, or None
    warned         the texts that `warn_once` has shown
    """

    fn: str | None = None
    stage: str | None = None
    finished: bool = False
    should_stop: bool = False
    current_epoch: int = 0
    global_step: int = 0
    batches_that_stepped: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    num_batches: dict[str, Any] = field(default_factory=dict)
    loaders: dict[str, Any] = field(default_factory=dict)
    ckpt_path: str | None = None
    warned: set[str] = field(default_factory=set)

    def begin(self, fn: str) -> None:
        """Begin a run: delete the last run's metrics, but keep the counters."""
        self.fn = fn
        self.stage = "train" if fn == "fit" else fn
        self.finished = False
        self.metrics = Metrics()

    def end(self, failed: bool = False) -> None:
        self.finished = not failed
        self.stage = None

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # Dataloaders need not be picklable: another run asks for them again.
        values = {name: getattr(self, name) for name in self.__slots__}
        return None, values | {"loaders": {}}

    def warn_once(self, text: str) -> None:
        """Warn, unless the same text was shown before."""
        if text not in self.warned:
            self.warned.add(text)
            if is_rank_zero():
                warnings.warn(text, stacklevel=2)
