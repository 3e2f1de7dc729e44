"""Where did the NaN come from? The first tensor that is not finite, by name: Trainer(detect_anomaly=True)."""

from typing import Any

import torch

from multigpu.errors import UserError
from multigpu.nested import tensors


def refuse_what_is_not_finite(trainer: Any, loss: torch.Tensor, batch: Any) -> None:
    """Raises UserError that names the step and the tensor: a weight, the batch, the loss, or a gradient."""
    weights = list(trainer.lightning_module.named_parameters())
    suspects = [(f"the weight {name!r}", weight) for name, weight in weights]
    suspects += [
        (f"the batch's tensor {place}", tensor) for place, tensor in enumerate(tensors(batch))
    ]
    suspects += [("the loss", loss)]
    suspects += [
        (f"the gradient of {name!r}", weight.grad)
        for name, weight in weights
        if weight.grad is not None
    ]
    for what, tensor in suspects:
        if tensor.is_floating_point() and not torch.isfinite(tensor.detach()).all():
            if what.startswith("the gradient") and trainer.precision_plugin.scaler is not None:
                continue  # too large a scale: the scaler skips the step
            raise UserError(
                f"in step {trainer.global_step} (epoch {trainer.current_epoch}) {what} is not finite: lower the learning rate, clip the "
                f"gradients, or look at the data.",
                already_reported=False,
            )
