"""Runs validation, testing and prediction: each of n ranks evaluates every n-th batch.

The metrics are reduced over the ranks at the epoch's end.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from multigpu.errors import UserError, pluralize
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.loops import advice, call_hooks, dataloaders, epoch_outputs
from multigpu.trainer.loops.log_context import LogContext
from multigpu.trainer.loops.log_rules import ONCE_PER_EPOCH
from multigpu.trainer.loops.loggers import send_to_loggers
from multigpu.trainer.loops.results import Reported, Results
from multigpu.trainer.module import LightningModule
from multigpu.trainer.states import RunningStage

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer

# Stage → its part of the hooks' names, as in on_validation_start.
PREFIX = {"validate": "validation", "test": "test", "predict": "predict"}


class EvaluationLoop:
    """Runs one of the three stages over one or several dataloaders; see also predict.py.

    stage         "validate", "test" or "predict"
    loaders       this rank's shards of the dataloaders
    sharded       per dataloader: whether it was sharded; if not, each rank gets all batches
    limits        per dataloader: the number of batches that this rank evaluates
    is_empty      whether there is no batch on any rank: no hook is then called
    uneven        whether some ranks get one batch more than others
    seen_batches  per dataloader: the number of batches over all runs, the loggers' x axis
    """

    def __init__(self, trainer: "Trainer", stage: str, loaders: list):
        state = trainer.state
        strategy = trainer.strategy
        self.trainer = trainer
        self.state = state
        self.module = state.lightning_module
        self.stage = stage
        self.loaders = [
            dataloaders.prepare_for_rank(trainer, loader, training=False) for loader in loaders
        ]
        self.num_shards, self.shard_index = (
            strategy.shard if trainer.use_distributed_sampler else (1, 0)
        )
        self.sharded = [
            self.num_shards > 1 and shard is not whole
            for whole, shard in zip(loaders, self.loaders, strict=True)
        ]
        self.epoch_outputs = None
        if stage != "predict":
            name = f"{PREFIX[stage]}_epoch_end"
            self.epoch_outputs = epoch_outputs.collect(self.module, name, len(loaders))
        self.uneven = False
        self.is_empty = True
        self.limits: list[float] = []
        self.seen_batches = [0] * len(loaders)
        kind = "val" if stage == "validate" else stage
        for loader in loaders:
            advice.on_workers(trainer, kind, [loader])
        name = f"limit_{kind}_batches"
        limit = getattr(trainer, name)
        if trainer.overfit_batches and stage == "validate":
            name = "overfit_batches"
        for whole, sharded in zip(loaders, self.sharded, strict=True):
            batches = dataloaders.limit_batches(dataloaders.num_batches(whole), limit, name)
            self.is_empty &= batches == 0
            if sharded:
                if 0 < batches < self.num_shards and self.epoch_outputs is not None:
                    raise UserError(
                        f"{self.epoch_outputs.name} needs the outputs of each rank, but "
                        f"{stage} has {pluralize(int(batches), 'batch')} for "
                        f"{self.num_shards} ranks: give a smaller batch_size.",
                        already_reported=not strategy.is_global_zero,
                    )
                self.uneven |= int(batches) % self.num_shards != 0
                batches = len(range(self.shard_index, int(batches), self.num_shards))
            self.limits.append(batches)
        setattr(state.data, f"num_{kind}_batches", self.limits)
        self.results = Results(strategy.gather_objects, trainer.world_size, training=False)
        self.results.device = state.results.device

    def run(self, sanity_steps: int | None = None) -> list[dict[str, Any]]:
        """Evaluate, and return the metrics of each dataloader; [] if there are no batches.

        sanity_steps   evaluate at most this many batches of each dataloader (-1: all)
        """
        if self.is_empty:
            return []
        trainer = self.trainer
        state = self.state
        outer_results = state.results
        outer_stage = state.stage
        state.results = self.results
        if state.stage == RunningStage.TRAINING:
            state.stage = RunningStage.VALIDATING
        state.evaluation_loop = self
        modes = {part: part.training for part in self.module.modules()}
        prefix = PREFIX[self.stage]
        getattr(self.module, f"on_{prefix}_model_eval")()
        # Virtual GPUs do not support inference tensors.
        inference = trainer.inference_mode and trainer.strategy.device.type != "vgpu"
        with torch.inference_mode() if inference else torch.no_grad():
            metrics = self._run_loaders(sanity_steps)
        if is_overridden(f"on_{prefix}_model_train", self.module, LightningModule):
            getattr(self.module, f"on_{prefix}_model_train")()
        else:
            for part, mode in modes.items():
                part.training = mode
        state.results = outer_results
        state.stage = outer_stage
        state.evaluation_loop = None
        return metrics

    def _run_loaders(self, sanity_steps: int | None) -> list[dict[str, Any]]:
        trainer = self.trainer
        metrics = self.state.metrics
        prefix = PREFIX[self.stage]
        call_hooks.call(trainer, f"on_{prefix}_start")
        call_hooks.call(trainer, f"on_{prefix}_epoch_start")
        step = self._batch_function()
        for number, loader in enumerate(self.loaders):
            limit = self.limits[number]
            if sanity_steps not in (None, -1):
                limit = min(limit, sanity_steps)
            dataloaders.start_epoch(loader, self.state.progress.current_epoch)
            if limit:
                for index, batch in enumerate(loader):
                    step(batch, index, number)
                    if index + 1 >= limit:
                        break
        self.results.start_batch(None)
        metrics.update(self.results.epoch_metrics())
        if self.epoch_outputs is not None:
            self.epoch_outputs.call(self.state)
        call_hooks.call(trainer, f"on_{prefix}_epoch_end")
        reported = self.results.epoch_metrics()
        metrics.update(reported)
        if not self.state.sanity_checking and self.stage != "predict":
            send_to_loggers(trainer, reported)
        advice.on_missing_logger(trainer, self.results)
        call_hooks.call(trainer, f"on_{prefix}_end")
        self.results.reset()
        return self._by_dataloader(reported)

    def _batch_function(self) -> Callable[[Any, int, int], None]:
        """Look up the hooks once, and return a function that evaluates one batch."""
        trainer = self.trainer
        state = self.state
        strategy = trainer.strategy
        results = self.results
        precision = state.precision
        transfer = state.transfer
        prefix = PREFIX[self.stage]
        name = f"{prefix}_step"
        several = len(self.loaders) > 1
        batch_start = call_hooks.lookup(trainer, f"on_{prefix}_batch_start")
        batch_end = call_hooks.lookup(trainer, f"on_{prefix}_batch_end")
        step_end = getattr(self.module, f"{prefix}_step_end", None)
        parameters = inspect.signature(getattr(self.module, name)).parameters
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        takes_index = len(parameters) > 1 or takes_any
        if several and len(parameters) == 2 and not takes_any:
            raise UserError(
                f"there are {len(self.loaders)} dataloaders, but {name} takes (batch, "
                f"batch_idx): add a third argument, dataloader_idx."
            )
        attributes = self.module.__dict__
        between_hooks = attributes["_log_context"]
        step_context = LogContext(results, name)
        predicts = self.stage == "predict"
        step = strategy.step_function(state.model, name)

        def evaluate(batch: Any, index: int, number: int) -> None:
            if self.sharded[number]:  # its index in the whole dataloader
                batch_idx = index * self.num_shards + self.shard_index
            else:
                batch_idx = index
            batch = transfer(batch, number)
            results.start_batch(batch, number if several else None)
            arguments = (batch, batch_idx, number) if several else (batch, batch_idx)
            if batch_start is not None:
                batch_start(*arguments)
            attributes["_log_context"] = step_context
            with precision.context():
                step_arguments = arguments if takes_index else (batch,)
                output = step(*step_arguments)
            if step_end is not None:
                output = step_end(output)
            attributes["_log_context"] = between_hooks
            if batch_end is not None:
                batch_end(output, *arguments)
            if self.epoch_outputs is not None:
                self.epoch_outputs.add(output, number)
            if predicts:
                self.after_batch(output, number)
            elif not state.sanity_checking:
                if results.any_fresh:
                    state.metrics.update(results.step_metrics(exchange=False))
                if results.last:
                    reported = results.last_step_metrics()
                    send_to_loggers(trainer, reported, batch=self.seen_batches[number])
                self.seen_batches[number] += 1

        return evaluate

    def after_batch(self, output: Any, number: int) -> None:
        """Called with predict_step's output after the hooks of the batch."""

    def check_all_gather(self, tensor: torch.Tensor, hook: str) -> None:
        """Raises UserError if self.all_gather in `hook` would hang or fail."""
        strategy = self.trainer.strategy
        if self.uneven and hook not in ONCE_PER_EPOCH:
            why = "different numbers of batches, so a rank would wait forever"
        elif len(shapes := set(strategy.gather_objects(tuple(tensor.shape)))) > 1:
            why = f"tensors of different shapes ({', '.join(map(str, sorted(shapes)))})"
        else:
            return
        raise UserError(
            f"self.all_gather cannot run in {self.stage}: the ranks have {why}. Call it at "
            f"the epoch's end, or give all {strategy.world.size} ranks the same number of "
            f"batches of one shape.",
            already_reported=not strategy.is_global_zero,
        )

    def _by_dataloader(self, reported: Reported) -> list[dict[str, Any]]:
        """Return each dataloader's metrics, with those that belong to no dataloader."""
        return [
            {
                name: value
                for name, value in reported.logger.items()
                if reported.loaders.get(name) in (None, number)
            }
            for number in range(len(self.loaders))
        ]
