"""Lightning's boring classes: random numbers, one layer, every step and every dataloader.

A report of an error often derives from them: from …demos.boring_classes import BoringModel.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.module import LightningModule

SIZE = 32
LENGTH = 64


class RandomDataset(Dataset):
    """`length` rows of `size` random numbers."""

    def __init__(self, size: int, length: int):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(RandomDataset):
    """Rows {"a": x, "b": x + 2}."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"a": self.data[index], "b": self.data[index] + 2}


class RandomIterableDataset(IterableDataset):
    """`count` rows of `size` random numbers, without a length."""

    def __init__(self, size: int, count: int):
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """One linear layer that learns to return ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        return F.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LRScheduler]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RandomDataset(SIZE, LENGTH))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(RandomDataset(SIZE, LENGTH))

    def test_dataloader(self) -> DataLoader:
        return DataLoader(RandomDataset(SIZE, LENGTH))

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(RandomDataset(SIZE, LENGTH))


class ManualOptimBoringModel(BoringModel):
    """BoringModel with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class BoringDataModule(LightningDataModule):
    """Another quarter of the random rows for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(SIZE, LENGTH * 4)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.random_train = self._quarter(0)
        if stage in ("fit", "validate"):
            self.random_val = self._quarter(1)
        if stage == "test":
            self.random_test = self._quarter(2)
        if stage == "predict":
            self.random_predict = self._quarter(3)

    def _quarter(self, number: int) -> Subset:
        return Subset(self.random_full, range(number * LENGTH, (number + 1) * LENGTH))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.random_predict)


class DemoModel(LightningModule):
    """A linear layer with its size and its learning rate as arguments."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02):
        super().__init__()
        self.l1 = torch.nn.Linear(SIZE, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).sum()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
