"""A user's script on two ranks: `python trainer_script.py MODE FOLDER`.

MODE is "whole", "stop" (rank 1 sets should_stop; all ranks write FOLDER/stopped.ckpt),
"resume" (from there), or what goes wrong: "exit" (rank 1 exits), "raise 0" and "raise 1" (that
rank raises).
Each rank writes its losses and its global step to FOLDER/MODE<rank>.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from quiet import QUIET
from torch.utils.data import DataLoader, TensorDataset

import multigpu.trainer as L

mode, folder = sys.argv[1], Path(sys.argv[2])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        rank = self.global_rank
        if mode == "exit" and (rank, self.global_step) == (1, 2):
            os._exit(7)
        if mode == f"raise {rank}" and self.global_step == 2:
            raise ZeroDivisionError(f"planted in rank {rank}")
        # One rank wants to stop, in the middle of a step.
        if mode == "stop" and (rank, self.global_step) == (1, 4):
            self.trainer.should_stop = True
        loss = self.layer(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if mode == "stop" and self.global_step == 5:
            self.trainer.save_checkpoint(folder / "stopped.ckpt")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    L.seed_everything(2, verbose=False)
    generator = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(24, 3, generator=generator))
    loader = DataLoader(rows, 4, shuffle=True)
    # horovodrun starts the ranks itself: each has one device.
    horovod = "HOROVOD_RANK" in os.environ
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="horovod" if horovod else "ddp",
        devices=1 if horovod else 2,
        max_epochs=3,
        default_root_dir=folder,
        **QUIET,
    )
    module = Net()
    try:
        ckpt_path = folder / "stopped.ckpt" if mode == "resume" else None
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    finally:
        report = json.dumps([module.losses, trainer.global_step])
        (folder / f"{mode}{trainer.global_rank}.json").write_text(report)
