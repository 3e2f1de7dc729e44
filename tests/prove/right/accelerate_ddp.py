"""Accelerate: the batch size is the one of all processes, because of split_batches."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
args = parser.parse_args()

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    mixed_precision=args.mixed_precision,
    gradient_accumulation_steps=args.accumulate,
    dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
)
set_seed(42)
x = torch.randn(72, 18)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(18, 36), nn.GELU(), nn.Linear(36, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

model.train()
for inputs, labels in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
accelerator.end_training()
