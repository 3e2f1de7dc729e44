"""Record what each rank sends and learns during a fit."""

import time
from typing import Any

import torch
from torch import nn

from multigpu import wire
from multigpu.strategies.bagua.async_average import AsyncModelAverage
from multigpu.trainer import Callback, LightningModule, Trainer

STEPS_BETWEEN_COPIES = 5


def flat_weights(model: nn.Module) -> torch.Tensor:
    """A copy of all parameters, as one vector on the CPU."""
    return torch.cat(
        [parameter.detach().reshape(-1).cpu() for parameter in model.parameters()]
    )


class Record(Callback):
    """Records a fit on each rank. Afterwards `ranks` has the records of all ranks, in order.

    loss              the loss of each epoch, over all ranks
    bytes             the bytes that the rank sent in each step, as the kernel counts them; for
                      bagua:async one number, the bytes per averaging round
    ends              the time at which each step ended, in seconds
    weights           copies of the rank's weights: after step 1, 1 + STEPS_BETWEEN_COPIES, …
                      and at the end
    steps             the number of steps made at each copy
    device            "cpu", "cuda" or "vgpu"
    averaging_rounds  for bagua:async, the number of averaging rounds until the end

    The copies are compared after the run. `bytes` does not contain what the Trainer itself
    sends between two steps.
    """

    def __init__(self) -> None:
        lists = ("loss", "bytes", "ends", "weights", "steps")
        self.record: dict[str, Any] = {name: [] for name in lists}
        self.ranks: list[dict[str, Any]] = []
        self.sent_before_step = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.sent_before_step = wire.bytes_sent()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.record["bytes"].append(wire.bytes_sent() - self.sent_before_step)
        self.record["ends"].append(time.perf_counter())
        if trainer.global_step % STEPS_BETWEEN_COPIES == 1:
            self._copy(trainer.global_step, pl_module)

    def _copy(self, step: int, module: LightningModule) -> None:
        weights = self.record["weights"]
        steps = self.record["steps"]
        if step in steps:  # the last step, which is copied again at the end
            weights.pop()
            steps.pop()
        weights.append(flat_weights(module))
        steps.append(step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record["loss"].append(float(trainer.callback_metrics["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._copy(trainer.global_step, pl_module)
        self.record["device"] = trainer.strategy.device.type
        algorithm = getattr(trainer.strategy, "algorithm", None)
        # With one rank, or while async warms up, there is no thread.
        if isinstance(algorithm, AsyncModelAverage) and algorithm.thread:
            self.record["averaging_rounds"] = algorithm.averaging_rounds
            self.record["bytes"] = [bytes_per_round(algorithm)]
        self.ranks = trainer.strategy.gather_objects(self.record)

    def state_dict(self) -> dict[str, Any]:
        """The records, which ddp_spawn returns from the processes that it trains in."""
        return {"ranks": self.ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ranks = state_dict["ranks"]


def bytes_per_round(algorithm: AsyncModelAverage) -> float:
    """Bytes that this rank sends per averaging round, vote included: the mean of three rounds.

    Call it while nothing else is sent. The count begins and ends between two rounds, so it
    contains only whole rounds. (It can have one vote more or less, which is 50 bytes.)
    """
    with algorithm.round_lock:
        before = wire.bytes_sent()
        first = algorithm.averaging_rounds
    while algorithm.averaging_rounds < first + 3 and algorithm.thread.is_alive():
        time.sleep(0.001)
    with algorithm.round_lock:
        return (wire.bytes_sent() - before) / max(1, algorithm.averaging_rounds - first)
