"""GPT and BERT of any size, without dropout: the same blocks, with another mask and head.

GPT: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
BERT: Devlin et al., "BERT" (2019).
"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Self-attention and a two-layer perceptron: (n, tokens, hidden) → the same shape.

    With `causal` a token sees only those before it, and LayerNorm comes first, as in GPT-2.
    Otherwise each token sees all others, and LayerNorm comes last, as in BERT.
    """

    def __init__(self, hidden: int, heads: int, causal: bool):
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.causal:
            x = x + self._attend(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self._attend(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, hidden = x.shape
        parts = self.qkv(x).view(rows, tokens, 3, self.heads, hidden // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, hidden))


class Transformer(nn.Module):
    """Token numbers (n, tokens) → logits (n, predicted tokens, vocabulary).

    The output layer shares its weights with the token embedding. A GPT predicts, for every
    token, the token after it. A BERT predicts the masked 15% of the tokens; here these are the
    first 15%, which takes the same time.
    """

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        tokens: int,
        vocabulary: int,
        causal: bool,
    ):
        super().__init__()
        self.predicted = tokens if causal else max(1, tokens * 15 // 100)
        self.words = nn.Embedding(vocabulary, hidden)
        self.places = nn.Embedding(tokens, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, causal) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.words(numbers) + self.places.weight[: numbers.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x[:, : self.predicted]), self.words.weight)


def gpt(
    layers: int, hidden: int, heads: int, tokens: int = 1024, vocabulary: int = 51_200
) -> Transformer:
    """A GPT. The vocabulary is GPT-2's of 50,257, rounded up as in Megatron-LM."""
    return Transformer(layers, hidden, heads, tokens, vocabulary, causal=True)


def bert(
    layers: int, hidden: int, heads: int, tokens: int = 512, vocabulary: int = 30_522
) -> Transformer:
    """A BERT."""
    return Transformer(layers, hidden, heads, tokens, vocabulary, causal=False)
