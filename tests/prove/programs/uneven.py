"""A CNN with AdamW, max-pools and a large rate: rounding soon changes its weights. DDP; an
epoch's last batch has 9 rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS, BATCH, EPOCHS = 393, 32, 2

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(1)
images, labels = torch.randn(ROWS, 1, 16, 16), torch.randint(10, (ROWS,))
model = DDP(
    nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)

for _ in range(EPOCHS):
    order = torch.randperm(ROWS)
    for batch in order.split(BATCH):
        mine = batch[rank::world]
        total = cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        loss = total * world / len(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

dist.destroy_process_group()
