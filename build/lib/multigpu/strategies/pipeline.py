"""pipeline: one model over several devices, stage after stage, with micro-batches in parallel.

The module lists its stages. A GPU works through its queue of kernels while Python continues,
so a plain loop over the micro-batches keeps all GPUs busy. Lesson 03 shows this in a picture,
and also has a version with one process per stage.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from multigpu.errors import UserError, pluralize
from multigpu.nested import map_tensors, tensors
from multigpu.strategies.base import Strategy


class PipelineStrategy(Strategy):
    """Stage i of `module.pipeline_stages()`, a list of submodules, is on device i.

    micro_batches   the number of micro-batches into which a batch is cut on dimension 0; 1 is
                    naive model parallelism. A batch with fewer rows, such as an epoch's last
                    one, is cut into single rows. Each micro-batch's loss is weighted by its
                    rows, so the gradients are those of the whole batch if `training_step`
                    returns a mean over rows. Outputs with one value per row are concatenated
                    for `training_step_end`, as in dp.

    A stage's inputs are moved to its device; autograd moves the gradients back. The rest of
    the module is on the first device. The last stage's output stays on the last device, so
    move the labels there with `labels.to(logits.device)`.
    """

    name = "pipeline"

    def __init__(self, micro_batches: int = 4):
        super().__init__()
        if type(micro_batches) is not int or micro_batches < 1:
            raise UserError(
                f"micro_batches is {micro_batches!r}: expected a whole number from 1 up."
            )
        self.micro_batches = micro_batches
        self.handles: list[RemovableHandle] = []

    def place(self, model: nn.Module) -> nn.Module:
        """Move each stage to its device, and the rest of the model to the first."""
        stages = self._stages(model)
        self.detach()
        model.to(self.device)
        for stage, device in zip(stages, self.devices, strict=True):
            stage.to(device)
            hook = _move_inputs_to(device)
            self.handles.append(stage.register_forward_pre_hook(hook, with_kwargs=True))
        return model

    def detach(self) -> None:
        """Remove the hooks that move the stages' inputs."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _stages(self, model: nn.Module) -> Sequence[nn.Module]:
        for candidate in (model, *model.children()):
            if hasattr(candidate, "pipeline_stages"):
                module = candidate
                break
        else:
            raise UserError(
                f"strategy 'pipeline' needs the module's stages, but {type(model).__name__} "
                f"lists none: give it a method pipeline_stages() that returns a list of its "
                f"layers, one per device."
            )
        stages = list(module.pipeline_stages())
        if len(stages) != len(self.devices):
            raise UserError(
                f"{type(module).__name__}.pipeline_stages() gives "
                f"{pluralize(len(stages), 'stage')}, but there are "
                f"{pluralize(len(self.devices), 'device')}. Each device needs exactly one "
                f"stage: give devices={len(stages)}."
            )
        return stages

    def step_function(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """A function that runs the step. A training step runs once per micro-batch.

        It returns the weighted sum of the micro-batches' losses, or joins their outputs if
        they are tensors with a dimension.
        """
        run = super().step_function(model, name)
        if name != "training_step" or self.micro_batches == 1:
            return run

        def run_micro_batches(batch: Any, *rest: Any) -> Any:
            weighted = self.split(batch)
            outputs = [run(micro_batch, *rest) for micro_batch, _ in weighted]
            if all(isinstance(output, torch.Tensor) and output.ndim for output in outputs):
                return torch.cat(outputs)
            losses = [
                output["loss"] if isinstance(output, dict) else output for output in outputs
            ]
            weights = [weight for _, weight in weighted]
            return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))

        return run_micro_batches

    def split(self, batch: Any) -> list[tuple[Any, float]]:
        """The micro-batches, each with its fraction of the batch's rows.

        Raises UserError if the batch has no rows.
        """
        if self.micro_batches == 1:
            return [(batch, 1.0)]
        rows = _rows(batch)
        if not rows:
            raise UserError(
                f"a batch without rows cannot be cut into {self.micro_batches} micro-batches: "
                f"give a batch with a tensor of shape (rows, …), "
                f"or PipelineStrategy(micro_batches=1)."
            )
        weighted = []
        for indices in torch.arange(rows).tensor_split(min(rows, self.micro_batches)):
            span = slice(int(indices[0]), int(indices[-1]) + 1)
            # A tensor without dimensions, for instance a weight, is the same for all rows.
            micro_batch = map_tensors(
                batch, lambda tensor, span=span: tensor[span] if tensor.ndim else tensor
            )
            weighted.append((micro_batch, len(indices) / rows))
        return weighted


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _move_inputs_to(device: torch.device) -> Callable[[nn.Module, tuple, dict], Inputs]:
    def hook(stage: nn.Module, args: tuple, kwargs: dict) -> Inputs:
        moved = tuple(
            value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for value in args
        )
        return moved, {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in kwargs.items()
        }

    return hook


def _rows(batch: Any) -> int | None:
    """The length of dimension 0 of the batch's first tensor that has one."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.ndim), None)
