"""Validation, testing and prediction: each of n ranks evaluates every n-th batch.

The metrics are reduced over the ranks at the epoch's end.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from multigpu.devices import to_cpu
from multigpu.errors import UserError, pluralize
from multigpu.trainer import dataloaders, epoch_outputs
from multigpu.trainer.results import Metrics
from multigpu.trainer.run import Run
from multigpu.trainer.step import takes_index

# Stage → its part of the hooks' names, as in on_validation_start.
PREFIX = {"validate": "validation", "test": "test", "predict": "predict"}


@dataclass
class Share:
    """This rank's share of a dataloader.

    loader         its shard; the user's loader, if that was not sharded
    sharded        False: each rank gets all batches
    limit          the number of batches that this rank evaluates
    seen_batches   the number of batches over all runs: the loggers' x axis
    outputs        what predict_step returned, if it is kept
    """

    loader: Any
    sharded: bool
    limit: float
    seen_batches: int = 0
    outputs: list = field(default_factory=list)


class EvaluationLoop:
    """Runs one of the three stages over one or several dataloaders.

    stage      "validate", "test" or "predict"
    prefix     the stage's part of the hooks' names; `data_name`: that of the dataloaders'
    shares     this rank's share of each dataloader
    is_empty   whether there is no batch on any rank: no hook is then called
    uneven     whether some ranks get one batch more than others
    """

    def __init__(self, run: Run, stage: str, loaders: list, keeps_outputs: bool = False):
        self.run = run
        self.stage = stage
        self.prefix = PREFIX[stage]
        self.data_name = "val" if stage == "validate" else stage
        self.step_name = f"{self.prefix}_step"
        self.several = len(loaders) > 1
        self.keeps_outputs = keeps_outputs
        uses_sampler = run.settings.use_distributed_sampler
        self.num_shards, self.shard_index = run.strategy.shard if uses_sampler else (1, 0)
        self.epoch_outputs = None
        if stage != "predict":
            name = f"{self.prefix}_epoch_end"
            self.epoch_outputs = epoch_outputs.collect(run.module, name, len(loaders))
        self.uneven = False
        self.is_empty = True
        self.shares = [self._share(loader) for loader in loaders]
        self.results = run.new_results(training=False)
        limits = [share.limit for share in self.shares]
        run.state.num_batches[self.data_name] = limits

    def _share(self, whole: Any) -> Share:
        """This rank's share of the user's dataloader."""
        run = self.run
        settings = run.settings
        loader = dataloaders.prepare_for_rank(settings, run.strategy, whole, training=False)
        length = dataloaders.num_batches(whole)
        batches = dataloaders.limit_batches(settings, length, self.data_name)
        self.is_empty &= batches == 0
        if self.num_shards == 1 or loader is whole:
            return Share(loader, sharded=False, limit=batches)
        if 0 < batches < self.num_shards and self.epoch_outputs is not None:
            raise UserError(
                f"{self.epoch_outputs.name} needs the outputs of each rank, but {self.stage} "
                f"has {pluralize(int(batches), 'batch')} for {self.num_shards} ranks: give a "
                f"smaller batch_size.",
                already_reported=not run.strategy.is_global_zero,
            )
        self.uneven |= int(batches) % self.num_shards != 0
        limit = len(range(self.shard_index, int(batches), self.num_shards))
        return Share(loader, sharded=True, limit=limit)

    def evaluate(self, sanity_steps: float | None = None) -> list[dict[str, Any]]:
        """Evaluate, and return the metrics of each dataloader; [] if there are no batches.

        sanity_steps   evaluate at most this many batches of each dataloader
        """
        if self.is_empty:
            return []
        run = self.run
        module = run.module
        outer_results = run.log.results
        outer_stage = run.state.stage
        run.log.results = self.results
        if outer_stage == "train":
            run.state.stage = "validate"
        run.evaluation = self
        modes = {part: part.training for part in module.modules()}
        module.eval()
        # Virtual GPUs do not support inference tensors.
        inference = run.settings.inference_mode and run.strategy.device.type != "vgpu"
        with torch.inference_mode() if inference else torch.no_grad():
            metrics = self._epoch(sanity_steps)
        for part, mode in modes.items():
            part.training = mode
        run.log.results = outer_results
        run.state.stage = outer_stage
        run.evaluation = None
        return metrics

    def _epoch(self, sanity_steps: float | None) -> list[dict[str, Any]]:
        run = self.run
        metrics = run.state.metrics
        run.call(f"on_{self.prefix}_start")
        run.call(f"on_{self.prefix}_epoch_start")
        self._look_up()
        for number, share in enumerate(self.shares):
            limit = share.limit if sanity_steps is None else min(share.limit, sanity_steps)
            dataloaders.start_epoch(share.loader, run.state.current_epoch)
            if limit:
                for index, batch in enumerate(share.loader):
                    self._evaluate_batch(batch, index, number)
                    if index + 1 >= limit:
                        break
        self.results.start_batch(None)
        metrics.update(self.results.epoch_metrics())
        if self.epoch_outputs is not None:
            self.epoch_outputs.call(run)
        run.call(f"on_{self.prefix}_epoch_end")
        reported = self.results.epoch_metrics()
        metrics.update(reported)
        if run.state.stage != "sanity_check" and self.stage != "predict":
            run.log.send(reported)
        run.call(f"on_{self.prefix}_end")
        self.results.reset()
        return self._by_dataloader(reported)

    def _look_up(self) -> None:
        """Look up what every batch needs."""
        run = self.run
        self.step = run.strategy.step_function(run.model, self.step_name)
        self.step_end = getattr(run.module, f"{self.step_name}_end", None)
        self.takes_index = takes_index(getattr(run.module, self.step_name))

    def _evaluate_batch(self, batch: Any, index: int, number: int) -> None:
        """Evaluate batch `index` of this rank's share of the dataloader `number`."""
        run = self.run
        share = self.shares[number]
        batch_idx = index
        if share.sharded:  # its index in the whole dataloader
            batch_idx = index * self.num_shards + self.shard_index
        batch = run.transfer(batch, number)
        self.results.start_batch(batch, number if self.several else None)
        arguments = (batch, batch_idx, number) if self.several else (batch, batch_idx)
        run.call(f"on_{self.prefix}_batch_start", *arguments)
        with run.log.within(self.step_name):
            with run.precision.context():
                output = self.step(*(arguments if self.takes_index else (batch,)))
            if self.step_end is not None:
                output = self.step_end(output)
        run.call(f"on_{self.prefix}_batch_end", output, *arguments)
        if self.epoch_outputs is not None:
            self.epoch_outputs.add(output, number)
        if self.keeps_outputs:
            share.outputs.append(to_cpu(output))
        if self.stage != "predict" and run.state.stage != "sanity_check":
            run.state.metrics.update(self.results.step_metrics(exchange=False))
            if self.results.last:
                reported = self.results.last_step_metrics()
                run.log.send(reported, batch=share.seen_batches)
            share.seen_batches += 1

    def predictions(self) -> list | None:
        """The kept outputs of all batches, in order, on every rank; None if none are kept.

        One list per dataloader if there are several.
        """
        if not self.keeps_outputs or self.is_empty:
            return None
        predictions = []
        for share in self.shares:
            lists = self.run.strategy.gather_objects(share.outputs)
            if share.sharded:
                total = sum(map(len, lists))
                ordered = [
                    lists[index % self.num_shards][index // self.num_shards]
                    for index in range(total)
                ]
            else:  # each rank predicted for all batches of its own loader
                ordered = [output for outputs in lists for output in outputs]
            predictions.append(ordered)
        return predictions[0] if len(predictions) == 1 else predictions

    def check_all_gather(self, tensor: torch.Tensor, hook: str) -> None:
        """Raises UserError if self.all_gather in `hook` would hang or fail."""
        strategy = self.run.strategy
        uneven = self.uneven and ("_step" in hook or "_batch_" in hook)
        if uneven or len(set(strategy.gather_objects(tuple(tensor.shape)))) > 1:
            difference = "numbers of batches" if uneven else "shapes"
            raise UserError(
                f"self.all_gather in {self.stage}: the ranks have different {difference}. "
                f"Call it at the epoch's end, with tensors of one shape.",
                already_reported=not strategy.is_global_zero,
            )

    def _by_dataloader(self, reported: Metrics) -> list[dict[str, Any]]:
        """Return each dataloader's metrics, with those that belong to no dataloader."""
        return [
            {
                name: value
                for name, value in reported.logged.items()
                if reported.loaders.get(name) in (None, number)
            }
            for number in range(len(self.shares))
        ]
