"""Which hooks can a module and a data module override? All do nothing here, so that who overrides none pays for none."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from multigpu.nested import mapped


class DataHooks:
    """Where the batches come from. A LightningModule and a LightningDataModule have them."""

    def prepare_data(self) -> None:
        """Download, on one rank of each node; set nothing on self."""

    def setup(self, stage: str) -> None:
        """On every rank, before anything else; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """On every rank, at the end."""

    def train_dataloader(self) -> Any:
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class ModuleHooks(DataHooks):
    """What happens when. The order is that of trainer/fit.py and trainer/evaluate.py.

    on_…_model_eval and on_…_model_train stand in the place of `eval()` and of the way back to the modes before.
    """

    def configure_model(self) -> None: ...
    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None: ...
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_model_eval(self) -> None: ...
    def on_validation_model_train(self) -> None: ...
    def on_test_model_eval(self) -> None: ...
    def on_test_model_train(self) -> None: ...
    def on_predict_model_eval(self) -> None: ...
    def on_predict_model_train(self) -> None: ...
    def on_before_backward(self, loss: torch.Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict) -> None: ...
    def on_load_checkpoint(self, checkpoint: dict) -> None: ...

    # Where only a replica's piece of the batch was seen (dp, ddp2), they get the pieces' outputs, gathered. Every strategy calls
    # them, so that a module does the same everywhere. They are looked for by name, so that none is there by default.
    # def training_step_end(self, step_output), validation_step_end, test_step_end


def overridden(name: str, thing: object, base: type) -> bool:
    """Has the user's class, or the object itself, its own version of the hook?"""
    mine = getattr(thing, name, None)
    return mine is not None and getattr(mine, "__func__", mine) is not getattr(
        base, name, None
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch's tensors on `device`, and what else has a `.to`; the rest as it is."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor
            if tensor.device == device
            else tensor.to(device, non_blocking=device.type != "cpu")
        )

    return mapped(
        batch,
        moved,
        lambda p: p.to(device) if hasattr(p, "to") and not isinstance(p, nn.Module) else p,
    )
