"""Runs a prediction, and keeps the outputs."""

from typing import TYPE_CHECKING, Any

from multigpu.devices import to_cpu
from multigpu.trainer.loops.evaluate import EvaluationLoop

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class PredictionLoop(EvaluationLoop):
    """Calls predict_step for each batch.

    outputs   per dataloader: this rank's outputs, if the user wants them
    """

    def __init__(self, trainer: "Trainer", loaders: list):
        super().__init__(trainer, "predict", loaders)
        self.outputs: list[list] = [[] for _ in self.loaders]

    def after_batch(self, output: Any, number: int) -> None:
        if self.state.return_predictions:
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
