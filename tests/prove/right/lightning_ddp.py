"""Lightning's Trainer with strategy ddp: it starts the processes, or torchrun does."""

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(96, 30, generator=generator)
        y = x[:, :3].argmax(1)
        return DataLoader(
            TensorDataset(x, y), batch_size=24 // self.trainer.world_size, shuffle=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default=os.environ.get("LOCAL_WORLD_SIZE", "auto"))
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        devices=args.devices,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier())
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f} on {trainer.world_size} devices")
