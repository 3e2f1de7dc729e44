"""Train a Llama with FSDP2: `torchrun --nproc-per-node=8 llama.py`, on GPUs with NCCL.

By default it is the model with 6.7 billion parameters of Touvron et al., "LLaMA" (arXiv
2302.13971). The tokens are random.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: each pair of features turns by its angle."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = angles.cos(), angles.sin()
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    return torch.stack(turned, -1).flatten(-2).type_as(x)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        projections = (self.query(x), self.key(x), self.value(x))
        split = [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projections]
        query, key, value = split
        query = rotate(query, angles)
        key = rotate(key, angles)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, intermediate: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, intermediate: int, words: int):
        super().__init__()
        self.width = hidden // heads
        self.words = nn.Embedding(words, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, intermediate) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.logits = nn.Linear(hidden, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        steps = torch.arange(0, self.width, 2, device=tokens.device)
        angles = torch.outer(places, 10_000.0 ** (-steps / self.width))
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return self.logits(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--inner", type=int, default=11_008)
    parser.add_argument("--words", type=int, default=32_000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    # Parameters have no memory until they are sharded.
    with torch.device("meta"):
        model = Llama(args.layers, args.hidden, args.heads, args.inner, args.words)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    for weight in model.parameters():
        nn.init.trunc_normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    for step in range(args.steps):
        tokens = torch.randint(args.words, (args.batch_size, args.length + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
