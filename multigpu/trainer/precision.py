"""Precision: 32 or 64 bit, 16 bit where that is safe (mixed), or 16 bit throughout (true)."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero
from multigpu.nested import map_tensors

NAMES = ("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
# The short names. Plain 16 means mixed: the weights stay in 32 bit.
SHORT = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
TYPES = {"32": torch.float32, "64": torch.float64, "16": torch.float16, "bf16": torch.bfloat16}


class Precision:
    """One run's precision on one kind of device.

    name     "32-true", "bf16-mixed", …
    dtype    the type of computations; with mixed, only of those that autocast selects
    mixed    weights in 32 bit, autocast around the forward
    scaler   16-mixed: torch's loss scaler, which keeps small gradients from becoming 0 in
             16 bit; else None

    Raises UserError for an unknown name, and for a type that the device does not support.
    """

    def __init__(self, precision: str | int = "32-true", device: torch.device | None = None):
        device = device or torch.device("cpu")
        self.name = SHORT.get(str(precision), precision)
        if self.name not in NAMES:
            known = ", ".join((*SHORT, *NAMES))
            raise UserError(f"precision is {precision!r}: expected one of {known}.")
        if self.name == "16-mixed" and device.type == "cpu":
            if is_rank_zero():
                warnings.warn(
                    "precision 16-mixed on the CPU: bf16-mixed is used instead.", stacklevel=3
                )
            self.name = "bf16-mixed"
        stem, _, how = self.name.partition("-")
        self.dtype = TYPES[stem]
        self.mixed = how == "mixed"
        self.device = device
        if stem == "bf16" and device.type != "cpu":
            gpus = torch.get_device_module(device)
            if not gpus.is_bf16_supported(including_emulation=False):
                name = gpus.get_device_name(device)
                remedy = "Give precision='16-mixed'"
                if device.type == "vgpu":
                    remedy += ", or start a GPU that has it, such as gpu='A100-40GB'"
                raise UserError(f"precision {self.name}: {name} has no bfloat16. {remedy}.")
        self.scaler = torch.amp.GradScaler(device.type) if self.name == "16-mixed" else None

    def convert_module(self, model: nn.Module) -> nn.Module:
        """Convert the weights to `dtype`, unless mixed or 32-true."""
        return model if self.mixed or self.dtype == torch.float32 else model.to(self.dtype)

    def convert_batch(self, batch: Any) -> Any:
        """Convert the batch's floating-point tensors to `dtype`, unless mixed or 32-true."""
        if self.mixed or self.dtype == torch.float32:
            return batch
        return map_tensors(
            batch,
            lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor,
        )

    def context(self) -> AbstractContextManager:
        """The context of each step's forward: autocast, or `dtype` as torch's default type."""
        if self.name == "32-true":
            return nullcontext()
        if self.mixed:
            # The cache would keep the weights' 16-bit copies for the whole step: after an
            # optimizer step within training_step, forward would use the old weights.
            return torch.autocast(self.device.type, self.dtype, cache_enabled=False)
        return default_dtype(self.dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, so that they can be clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, **keywords: Any) -> Any:
        """Return what `optimizer.step(**keywords)` returns.

        If a gradient is not finite, a scaler skips the step and lowers the scale.
        """
        if self.scaler is None:
            return optimizer.step(**keywords)
        returned = self.scaler.step(optimizer, **keywords)
        self.scaler.update()
        return returned


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context in which new floating-point tensors have `dtype`."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
