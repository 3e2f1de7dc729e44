"""The hooks that a module and a data module can override. Most do nothing by default.

The hooks of a batch are called only if they are overridden: the others cost nothing.
"""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from multigpu.nested import map_tensors

NO_DATALOADER = "there is no such method: write it, or give the dataloaders to the Trainer."


class DataHooks:
    """The hooks for data, which LightningModule and LightningDataModule share.

    prepare_data_per_node   False: prepare_data is called on rank 0 only, for nodes that share
                            their disk; True: on one rank of each node
    """

    prepare_data_per_node: bool = True

    def prepare_data(self) -> None:
        """Download data. Called on one rank per node only, so set no attributes on self."""

    def setup(self, stage: str) -> None:
        """Called on every rank before a run of `stage`: fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Called on every rank after a run."""

    def train_dataloader(self) -> Any:
        raise NotImplementedError(NO_DATALOADER)

    def val_dataloader(self) -> Any:
        raise NotImplementedError(NO_DATALOADER)

    def test_dataloader(self) -> Any:
        raise NotImplementedError(NO_DATALOADER)

    def predict_dataloader(self) -> Any:
        raise NotImplementedError(NO_DATALOADER)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        # A dataloader's batches are on the CPU.
        return batch if device.type == "cpu" else to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class ModuleHooks(DataHooks):
    """The hooks of a LightningModule. start.py, fit.py, step.py and evaluate.py call them.

    A run that resumes within an epoch calls on_train_epoch_start for the rest of it, because
    what the hook prepares is not in the checkpoint. Lightning does not call it.
    """

    def configure_model(self) -> None:
        """Make layers here instead of in __init__.

        It can be called several times: return at once if the layers exist.
        """

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
    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0): ...
    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0): ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch, batch_idx, dataloader_idx=0): ...
    def on_test_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0): ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch, batch_idx, dataloader_idx=0): ...
    def on_predict_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0): ...

    def on_before_backward(self, loss: torch.Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict) -> None: ...
    def on_load_checkpoint(self, checkpoint: dict) -> None: ...

    # Seven more hooks, of Lightning 1.x, have no default, and are called if a module has them.
    #     training_epoch_end(outputs), validation_epoch_end, test_epoch_end
    # See epoch_outputs.py.
    #     training_step_end(step_output), validation_step_end, test_step_end, predict_step_end
    # With dp and ddp2, each replica computes a part of the batch; these hooks get the outputs
    # of all replicas. They are called with every strategy, so a module works with each.


def is_overridden(name: str, obj: object, base: type) -> bool:
    """Whether `obj`, or its class, overrides the method `name` of `base`."""
    method = getattr(obj, name, None)
    if method is None:
        return False
    return getattr(method, "__func__", method) is not getattr(base, name, None)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the batch's tensors, and other objects that have `.to`, to `device`."""

    def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=device.type != "cpu")

    def move_other(value: Any) -> Any:
        # A module in a batch is not data: leave it where it is.
        if isinstance(value, nn.Module) or not hasattr(value, "to"):
            return value
        return value.to(device)

    return map_tensors(batch, move_tensor, move_other)
