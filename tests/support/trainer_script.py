"""A user's script, `python trainer_script.py MODE FOLDER`, which starts itself again for its second rank, and what goes wrong."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
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
        here = (self.global_rank, self.global_step)
        if (mode, *here) in (("exit", 1, 2),):
            os._exit(7)
        if (mode, *here) in (("raise 1", 1, 2), ("raise 0", 0, 2)):
            raise ZeroDivisionError(f"planted in rank {self.global_rank}")
        if mode == "term" and here == (1, 4):  # in the midst of a step, to one rank
            os.kill(os.getpid(), signal.SIGTERM)
        loss = self.layer(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    L.seed_everything(2, verbose=False)
    source = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(24, 3, generator=source)), 4, shuffle=True)
    horovod = "HOROVOD_RANK" in os.environ
    trainer = L.Trainer(
        accelerator="cpu", strategy="horovod" if horovod else "ddp", devices=1 if horovod else 2, max_epochs=3,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, default_root_dir=folder,
    )  # fmt: skip
    module = Net()
    try:
        trainer.fit(
            module, loader, ckpt_path=folder / "stopped.ckpt" if mode == "resume" else None
        )
    finally:
        (folder / f"{mode}{trainer.global_rank}.json").write_text(
            json.dumps([module.losses, trainer.global_step])
        )
