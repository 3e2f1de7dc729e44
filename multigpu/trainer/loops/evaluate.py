"""How do validation, testing and prediction run? Every n-th batch on each rank, each sample once, and one sum at the end."""

import inspect
from typing import Any

import torch

from multigpu.devices import on_the_cpu
from multigpu.errors import UserError
from multigpu.trainer.hooks import overridden
from multigpu.trainer.loops import call_hooks, dataloaders
from multigpu.trainer.loops.log_rules import BETWEEN
from multigpu.trainer.loops.results import Results
from multigpu.trainer.loops.transfer import transfer
from multigpu.trainer.module import LightningModule

HOOK = {"validate": "validation", "test": "test", "predict": "predict"}


class Evaluation:
    """One of the three, over one or several dataloaders.

    stage      "validate", "test" or "predict"
    whole      the loaders as the user gave them
    loaders    this rank's share of them
    """

    def __init__(self, trainer: Any, stage: str, loaders: list, limit: int | float | None):
        self.trainer, self.module, self.stage = trainer, trainer.lightning_module, stage
        self.loaders = [trainer.deal(loader, training=False) for loader in loaders]
        parts, mine = trainer.strategy.shard if trainer.use_distributed_sampler else (1, 0)
        self.uneven = self.kept = False
        self.limits: list[float] = []
        self.seen = [0] * len(
            loaders
        )  # batches of each, in all runs: what is logged by step stands there
        name = f"limit_{'val' if stage == 'validate' else stage}_batches"
        if trainer.overfit_batches and stage == "validate":
            name = "overfit_batches"
        self.dealt = [
            share is not whole for whole, share in zip(loaders, self.loaders, strict=True)
        ]
        for whole, dealt in zip(loaders, self.dealt, strict=True):
            batches = dataloaders.limited(dataloaders.length(whole), limit, name)
            # not dealt out: each rank has all that the loader gives
            self.limits.append(len(range(mine, int(batches), parts)) if dealt else batches)
            self.uneven |= dealt and int(batches) % parts != 0
        self.parts, self.mine = parts, mine
        self.results = Results(
            trainer.strategy.gather_objects, trainer.world_size, training=False
        )
        self.results.home = trainer.results.home

    def run(self, sanity: int | None = None) -> list[dict[str, Any]]:
        """The metrics of each dataloader; for prediction use `predict`. `sanity`: so many batches (-1: all)."""
        trainer, before = self.trainer, (self.trainer.results, self.trainer.training)
        trainer.results, trainer.training, trainer.evaluating = self.results, False, self
        modes = {part: part.training for part in self.module.modules()}
        swap = f"on_{HOOK[self.stage]}_model"
        getattr(self.module, f"{swap}_eval")() if self._own(
            f"{swap}_eval"
        ) else self.module.eval()
        # virtual GPUs know no inference tensors
        quick = trainer.inference_mode and trainer.strategy.device.type != "vgpu"
        with torch.inference_mode() if quick else torch.no_grad():
            told = self._loaders(sanity)
        if self._own(f"{swap}_train"):
            getattr(self.module, f"{swap}_train")()
        else:
            for part, mode in modes.items():
                part.training = mode
        (trainer.results, trainer.training), trainer.evaluating = before, None
        return told

    def _own(self, name: str) -> bool:
        return overridden(name, self.module, LightningModule)

    def _loaders(self, sanity: int | None) -> list[dict[str, Any]]:
        trainer, kind = self.trainer, HOOK[self.stage]
        call_hooks.call(trainer, f"on_{kind}_start")
        call_hooks.call(trainer, f"on_{kind}_epoch_start")
        step = self._stepper()
        for number, loader in enumerate(self.loaders):
            limit = (
                self.limits[number]
                if sanity in (None, -1)
                else min(self.limits[number], sanity)
            )
            dataloaders.start_epoch(loader, trainer.current_epoch)
            if limit:
                for index, batch in enumerate(loader):
                    step(batch, index, number)
                    if index + 1 >= limit:
                        break
        self.results.start_batch(None)
        trainer.take(self.results.epoch_metrics())
        call_hooks.call(trainer, f"on_{kind}_epoch_end")
        told = self.results.epoch_metrics()
        trainer.take(told)
        if not trainer.sanity_checking and self.stage != "predict":
            trainer.send(told)
        call_hooks.call(trainer, f"on_{kind}_end")
        self.results.reset()
        return self._by_loader(told.log)

    def _stepper(self) -> Any:
        """A function for one batch, with its hooks looked up once."""
        trainer, kind, many = self.trainer, HOOK[self.stage], len(self.loaders) > 1
        start, end = (
            call_hooks.at(trainer, f"on_{kind}_batch_start"),
            call_hooks.at(trainer, f"on_{kind}_batch_end"),
        )
        step_end = getattr(self.module, f"{kind}_step_end", None)
        takes = inspect.signature(getattr(self.module, f"{kind}_step")).parameters
        any_number = any(p.kind is p.VAR_POSITIONAL for p in takes.values())
        takes_index = len(takes) > 1 or any_number
        if many and len(takes) == 2 and not any_number:
            raise UserError(
                f"there are {len(self.loaders)} dataloaders, and {kind}_step takes (batch, batch_idx): "
                f"add a third argument, dataloader_idx."
            )
        self.outputs: list[list] = [[] for _ in self.loaders]

        def step(batch: Any, index: int, number: int) -> None:
            place = (
                index * self.parts + self.mine if self.dealt[number] else index
            )  # as one process would count
            batch = transfer(trainer, batch, number)
            self.results.start_batch(batch, number if many else None)
            told = (batch, place, number) if many else (batch, place)
            if start is not None:
                start(*told)
            self.results.hook = f"{kind}_step"
            with trainer.precision_plugin.context():
                output = trainer.strategy.run_step(
                    trainer.model, f"{kind}_step", *(told if takes_index else (batch,))
                )
            output = step_end(output) if step_end is not None else output
            self.results.hook = ""
            if end is not None:
                end(output, *told)
            if self.kept:
                self.outputs[number].append(on_the_cpu(output))
            elif self.results.any_fresh and not trainer.sanity_checking:
                trainer.take(self.results.step_metrics(exchange=False))
                trainer.send(trainer.last_told, step=self.seen[number])
                self.seen[number] += 1

        return step

    def refuse_uneven(self, tensor: torch.Tensor) -> None:
        """A collective in a step waits for ever if one rank has a batch more than another, and breaks if one is smaller."""
        strategy = self.trainer.strategy
        if self.uneven and self.results.hook not in BETWEEN:
            why = "different numbers of batches, so one of them would wait for ever"
        elif len(shapes := set(strategy.gather_objects(tuple(tensor.shape)))) > 1:
            why = f"tensors of different shapes ({', '.join(map(str, sorted(shapes)))})"
        else:
            return
        raise UserError(
            f"self.all_gather in {self.stage}: the ranks have {why}. Use it at the epoch's end, or batches that "
            f"{strategy.world.size} ranks can share evenly.",
            already_reported=not strategy.is_global_zero,
        )

    def _by_loader(self, log: dict[str, Any]) -> list[dict[str, Any]]:
        """Each dataloader's own metrics, and those of all."""
        numbers = range(len(self.loaders))
        if len(self.loaders) == 1:
            return [dict(log)]
        ends = [f"/dataloader_idx_{number}" for number in numbers]
        return [
            {
                key: value
                for key, value in log.items()
                if key.endswith(ends[number]) or not key.endswith(tuple(ends))
            }
            for number in numbers
        ]

    def predict(self) -> list | None:
        """What `predict_step` gave for each batch, in the order of the batches, from all ranks, on all ranks."""
        self.kept = self.trainer.return_predictions
        self.run()
        if not self.kept:
            return None
        everybody = self.trainer.strategy.gather_objects(self.outputs)
        found = []
        for number, dealt in enumerate(self.dealt):
            lists = [theirs[number] for theirs in everybody]
            if not dealt:  # each rank predicted what its own loader gave
                found.append([output for theirs in lists for output in theirs])
                continue
            total = sum(map(len, lists))
            found.append(
                [lists[place % self.parts][place // self.parts] for place in range(total)]
            )
        return found[0] if len(found) == 1 else found
