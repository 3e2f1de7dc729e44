"""A small GPT on sequences of unequal lengths: the loss is the mean over all ranks' tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, LENGTH, WIDTH, HEADS, BATCH, STEPS, PAD = 40, 12, 16, 2, 16, 8, -100


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU())
        self.down = nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.embedding(words) + self.position
        heads = self.attention(self.before(x)).unflatten(2, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).flatten(2))
        return self.head(x + self.down(self.mlp(x)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)
words = torch.randint(WORDS, (BATCH * STEPS, LENGTH + 1), generator=generator)
lengths = torch.randint(2, LENGTH + 1, (BATCH * STEPS, 1), generator=generator)

torch.manual_seed(0)
net = GPT()
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for step in range(STEPS):
    rows = torch.arange(step * BATCH, (step + 1) * BATCH)[rank::world]
    x, y = words[rows, :-1], words[rows, 1:]
    y = y.masked_fill(torch.arange(LENGTH) >= lengths[rows], PAD)
    tokens = (y != PAD).sum()
    dist.all_reduce(tokens)
    total = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    loss = total / tokens * world  # DDP divides by the number of ranks
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
