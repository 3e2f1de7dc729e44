"""The models that a real and a virtual GPU train: the course's CNN, ResNet-50, a small GPT.

Weights and batches come from the CPU's random numbers, so all devices get the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from multigpu import devices
from multigpu.models import CNN
from multigpu.models.resnet import resnet, stage


class Block(nn.Module):
    """A transformer's layer with causal attention: (batch, sequence, width) → the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Numbers of words (batch, sequence) → logits (batch, sequence, words)."""

    def __init__(self, layers: int, width: int, heads: int, length: int, words: int):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.blocks(self.words(words) + self.places(places))
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Size:
    """`image` is the height and width of ResNet-50's images; the rest is the GPT's.

    Without `whole`, ResNet-50 has one of its sixteen blocks, for a rehearsal.
    """

    image: int = 224
    whole: bool = True
    layers: int = 6
    width: int = 512
    heads: int = 8
    length: int = 512
    words: int = 32_000


FULL = Size()
TINY = Size(image=16, whole=False, layers=1, width=32, heads=2, length=16, words=64)
MODELS = ("cnn", "resnet50", "gpt")


def new_model(name: str, size: Size) -> nn.Module:
    """The model on the CPU, with the weights of seed 0."""
    torch.manual_seed(0)
    if name == "cnn":
        return CNN((1, 28, 28), hidden=320)
    if name == "resnet50":
        return resnet(50) if size.whole else one_block()
    return GPT(size.layers, size.width, size.heads, size.length, size.words)


def one_block() -> nn.Sequential:
    """A ResNet of one block: images (n, 3, h, w) → logits (n, 1000)."""
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1000))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), stage(8, 8, 1, 2), *head)


def new_batch(
    name: str, size: Size, rows: int, device: torch.device, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels on the device, from the CPU's random numbers."""
    generator = torch.Generator().manual_seed(seed)
    if name == "gpt":
        words = torch.randint(size.words, (rows, size.length + 1), generator=generator)
        return words[:, :-1].to(device), words[:, 1:].to(device)
    shape = (1, 28, 28) if name == "cnn" else (3, size.image, size.image)
    classes = 10 if name == "cnn" else 1000
    images = torch.randn(rows, *shape, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    return images.to(device), labels.to(device)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean loss of a batch, in float32."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).float().flatten(0, -2), labels.flatten())


def training_step(
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    half: torch.dtype | None = None,
    lr: float = 0.01,
) -> Callable[[], torch.Tensor]:
    """A function that makes one step of SGD with momentum, and returns the loss.

    With `half`, forward runs under autocast with that dtype.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    kind = batch[0].device.type

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(kind, half or torch.bfloat16, enabled=half is not None):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Within the block, products and convolutions of float32 use TF32, or full float32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def compute_exactly() -> None:
    """The settings of the lessons' --prove, for this process."""
    devices.compute_exactly()
