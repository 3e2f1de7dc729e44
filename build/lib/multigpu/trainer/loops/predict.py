"""Runs a prediction: keeps the outputs, and the rows of each batch for prediction writers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from multigpu.devices import to_cpu
from multigpu.trainer.callbacks import BasePredictionWriter
from multigpu.trainer.loops.dataloaders import with_batch_sampler
from multigpu.trainer.loops.evaluate import EvaluationLoop

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class RecordedBatches:
    """A batch sampler that remembers the rows of the batches that it gave."""

    def __init__(self, batches: Any):
        self.batches = batches
        self.rows: list[list[int]] = []

    def __iter__(self) -> Iterator:
        self.rows = []
        for rows in self.batches:
            self.rows.append(rows)
            yield rows

    def __len__(self) -> int:
        return len(self.batches)


class PredictionLoop(EvaluationLoop):
    """Calls predict_step for each batch.

    outputs                  per dataloader: this rank's outputs, if anything needs them
    current_batch_indices    the rows of the running batch, if a prediction writer needs them
    epoch_batch_indices      per dataloader: the rows of each batch, likewise
    """

    def __init__(self, trainer: "Trainer", loaders: list):
        super().__init__(trainer, "predict", loaders)
        writers = [cb for cb in trainer.callbacks if isinstance(cb, BasePredictionWriter)]
        self._writes_batches = any(writer.interval != "epoch" for writer in writers)
        self._writes_epoch = any(writer.interval != "batch" for writer in writers)
        self._keeps_outputs = self._writes_epoch or self.state.return_predictions
        self._recorded: list[RecordedBatches | None] = [None] * len(self.loaders)
        self.outputs: list[list] = [[] for _ in self.loaders]
        self.current_batch_indices: list[int] | None = None
        self.epoch_batch_indices: list[list] = [[] for _ in self.loaders]
        if writers:
            for number, loader in enumerate(self.loaders):
                self._record(number, loader)

    def _record(self, number: int, loader: Any) -> None:
        """Read the loader through RecordedBatches, if it has batches of a known data set."""
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return
        if not isinstance(loader.dataset, IterableDataset):
            self._recorded[number] = RecordedBatches(loader.batch_sampler)
            self.loaders[number] = with_batch_sampler(loader, self._recorded[number])

    @property
    def predictions(self) -> list:
        """This rank's outputs; a list per dataloader if there are several."""
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def before_step(self, index: int, number: int) -> None:
        """Before predict_step of this rank's batch `index` of the dataloader `number`."""
        recorded = self._recorded[number]
        rows = recorded.rows[index] if recorded is not None else None
        self.current_batch_indices = rows if self._writes_batches else None
        if rows is not None and self._writes_epoch:
            self.epoch_batch_indices[number].append(rows)

    def after_batch(self, output: Any, number: int) -> None:
        if self._keeps_outputs:
            self.outputs[number].append(to_cpu(output))

    def predict(self) -> list | None:
        """Return `predict_step`'s outputs for all batches, in order, on every rank.

        Returns one list per dataloader if there are several; None if return_predictions is
        False, or if there are no batches.
        """
        if self.is_empty:
            return None
        self.run()
        if not self.state.return_predictions:
            return None
        of_ranks = self.trainer.strategy.gather_objects(self.outputs)
        predictions = []
        for number, sharded in enumerate(self.sharded):
            lists = [outputs[number] for outputs in of_ranks]
            if sharded:
                total = sum(map(len, lists))
                ordered = [
                    lists[index % self.num_shards][index // self.num_shards]
                    for index in range(total)
                ]
            else:  # each rank predicted for all batches of its own loader
                ordered = [output for outputs in lists for output in outputs]
            predictions.append(ordered)
        return predictions[0] if len(predictions) == 1 else predictions
