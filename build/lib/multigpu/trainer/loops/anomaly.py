"""Trainer(detect_anomaly=True): names the first tensor that is not finite."""

from typing import TYPE_CHECKING, Any

import torch

from multigpu.errors import UserError
from multigpu.nested import tensors

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def check_finite(trainer: "Trainer", loss: torch.Tensor, batch: Any) -> None:
    """Raises UserError if a tensor is not finite; the error names the step and the tensor.

    Checks the weights, the batch, the loss and the gradients, in this order.
    """
    state = trainer.state
    weights = list(state.lightning_module.named_parameters())
    named = [(f"the weight {name!r}", weight) for name, weight in weights]
    named += [
        (f"the batch's tensor {number}", tensor)
        for number, tensor in enumerate(tensors(batch))
    ]
    named += [("the loss", loss)]
    # With a loss scaler an infinite gradient is expected: the scaler skips the step and lowers
    # the scale.
    if state.precision.scaler is None:
        named += [
            (f"the gradient of {name!r}", weight.grad)
            for name, weight in weights
            if weight.grad is not None
        ]
    for what, tensor in named:
        if tensor.is_floating_point() and not torch.isfinite(tensor.detach()).all():
            raise UserError(
                f"in step {trainer.global_step} (epoch {trainer.current_epoch}) {what} is not "
                f"finite: lower the learning rate, clip the gradients, or check the data.",
                already_reported=False,
            )
