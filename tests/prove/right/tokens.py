"""A small transformer on sequences of different lengths: the mean over all ranks' tokens."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY, WIDTH, LENGTH, PAD = 50, 32, 12, 0


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, *, tokens, padding):
        x = self.embedding(tokens) + self.positions
        return self.head(self.encoder(x, src_key_padding_mask=padding))


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = DDP(Tagger().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

for step in range(6):
    lengths = torch.randint(3, LENGTH + 1, (8, 1))
    tokens = torch.randint(1, VOCABULARY, (8, LENGTH))
    tokens[torch.arange(LENGTH) >= lengths] = PAD
    tokens = tokens.chunk(world)[rank].to(device)
    tags = (tokens % 8).masked_fill(tokens == PAD, -100)
    count = (tags != -100).sum()
    dist.all_reduce(count)

    logits = model(tokens=tokens, padding=tokens == PAD)
    summed = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="sum")
    loss = summed * world / count  # DDP divides the gradients by the number of ranks
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}, {count.item()} tokens")
dist.destroy_process_group()
