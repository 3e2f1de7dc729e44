"""pipeline: one model over several devices, its stages one after the other; with micro-batches they work side by side.

The module names its stages. GPUs take their work in a queue, so a plain loop over the micro-batches keeps all of them busy:
lesson 03 draws it, and has the version with a process a stage.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from multigpu.errors import UserError, pluralize
from multigpu.nested import mapped, tensors
from multigpu.strategies.base import Strategy


class PipelineStrategy(Strategy):
    """Stage i of `module.pipeline_stages()`, a list of the module's own submodules, lies on device i.

    micro_batches   pieces that a batch is cut into on dimension 0; 1 is naive model parallelism. Each piece's loss counts by
                    its number of rows, so the gradients are those of the whole batch, if `training_step` gives a mean
                    over rows. What has a value a row is joined, for `training_step_end`, as dp joins it.

    What a stage gets is moved to its device; so is what autograd sends back. The rest of the module is on the first device,
    and the last stage's output stays on the last: the labels go there with `labels.to(logits.device)`.
    """

    name = "pipeline"

    def __init__(self, micro_batches: int = 4):
        super().__init__()
        if type(micro_batches) is not int or micro_batches < 1:
            raise UserError(
                f"micro_batches is {micro_batches!r}: expected a whole number from 1 up."
            )
        self.micro_batches = micro_batches
        self.handles: list = []

    def place(self, model: nn.Module) -> nn.Module:
        stages = self._stages(model)
        self.detach()
        model.to(self.device)
        for stage, device in zip(stages, self.devices, strict=True):
            stage.to(device)
            self.handles.append(
                stage.register_forward_pre_hook(_fetch(device), with_kwargs=True)
            )
        return model

    def detach(self) -> None:
        """The stages take what they are given, wherever it lies."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _stages(self, model: nn.Module) -> Sequence[nn.Module]:
        inner = next(
            (part for part in (model, *model.children()) if hasattr(part, "pipeline_stages")),
            model,
        )
        if not hasattr(inner, "pipeline_stages"):
            raise UserError(
                f"strategy 'pipeline' places a module's stages, and {type(inner).__name__} names none: "
                f"give it a method pipeline_stages() that returns a list of its layers, one a device."
            )
        stages = list(inner.pipeline_stages())
        if len(stages) != len(self.devices):
            raise UserError(
                f"{type(inner).__name__}.pipeline_stages() gives {pluralize(len(stages), 'stage')}, and there are "
                f"{pluralize(len(self.devices), 'device')}: one stage a device, so give devices={len(stages)}."
            )
        return stages

    def run_step(self, model: nn.Module, name: str, *args: Any) -> Any:
        """In training, all micro-batches forward; one backward of their sum then works through them."""
        if name != "training_step" or self.micro_batches == 1:
            return model(name, *args)
        batch, *rest = args
        pieces = self.pieces(batch)
        outputs = [model(name, piece, *rest) for piece, _ in pieces]
        if all(isinstance(output, torch.Tensor) and output.ndim for output in outputs):
            return torch.cat(outputs)
        losses = [output["loss"] if isinstance(output, dict) else output for output in outputs]
        return sum(share * loss for loss, (_, share) in zip(losses, pieces, strict=True))

    def pieces(self, batch: Any) -> list[tuple[Any, float]]:
        """The micro-batches, and the share of the rows that each has. Raises UserError if the batch cannot be cut."""
        if self.micro_batches == 1:
            return [(batch, 1.0)]
        rows = _rows(batch)
        if rows is None or rows < self.micro_batches:
            raise UserError(
                f"a batch of {rows or 'no'} rows cannot be cut into {self.micro_batches} micro-batches: "
                f"give a larger batch, or PipelineStrategy(micro_batches={max(1, rows or 1)})."
            )
        sizes = [len(part) for part in torch.arange(rows).tensor_split(self.micro_batches)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            (mapped(batch, lambda tensor, at=at, n=n: tensor[at : at + n]), n / rows)
            for at, n in zip(starts, sizes, strict=True)
        ]


def _fetch(device: torch.device) -> Any:
    def hook(stage: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        moved = tuple(
            a.to(device, non_blocking=True) if isinstance(a, torch.Tensor) else a for a in args
        )
        return moved, {
            k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()
        }

    return hook


def _rows(batch: Any) -> int | None:
    """The length of dimension 0 of the first tensor in the batch."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.ndim), None)
