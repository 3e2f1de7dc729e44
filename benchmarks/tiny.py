"""What trainer.py measures: a tiny model in a plain loop, and in both Trainers."""

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = (torch.randn(8, 4), torch.randint(0, 2, (8,)))


class Batches:
    """The same batch `number` times, without the time of a DataLoader."""

    def __init__(self, number: int):
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Any:
        return iter([BATCH] * self.number)


def module_for(L: ModuleType, logs: bool) -> Any:
    class Tiny(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if logs:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Tiny()


def plain(number: int) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for images, labels in Batches(number):
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trained(L: ModuleType, number: int, folder: str, everything: bool) -> None:
    logger = L.pytorch.loggers.TensorBoardLogger(folder) if everything else False
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=logger,
        enable_checkpointing=everything,
        enable_progress_bar=everything,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module_for(L, everything), Batches(number))


def steps(number: int, rounds: int, folder: str, out: str) -> None:
    import lightning

    import multigpu.trainer

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], None]] = {"plain": lambda: plain(number)}
    for name, L in (("multigpu", multigpu.trainer), ("lightning", lightning)):
        runs[name] = lambda L=L: trained(L, number, folder, False)
        runs[f"{name}, all on"] = lambda L=L: trained(L, number, folder, True)
    above: dict[str, list[float]] = {name: [] for name in runs if name != "plain"}
    for turn in range(rounds + 1):
        for name, differences in above.items():
            # A difference of a few µs needs more pairs than one of hundreds.
            for _ in range(5 if name == "multigpu" else 1):
                before = duration(runs["plain"])
                trainer = duration(runs[name])
                after = duration(runs["plain"])
                # The first turn warms up.
                if turn:
                    difference = trainer - (before + after) / 2
                    differences.append(difference / number * 1e6)
    Path(out).write_text(json.dumps(above))


def duration(run: Callable[[], None]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def ranks(data: str) -> None:
    """Ten steps on two ranks, which this script starts."""
    import numpy as np

    import multigpu.trainer as L

    # bare.py has a copy of this model.
    from multigpu.models import CNN

    class Lit(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = CNN()

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    with np.load(data) as file:
        train = TensorDataset(
            torch.from_numpy(file["x_train"])[:, None], torch.from_numpy(file["y_train"])
        )
    trainer = L.Trainer(
        max_steps=10,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Lit(), DataLoader(train, batch_size=32, shuffle=True))


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        steps(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        ranks(sys.argv[2])
