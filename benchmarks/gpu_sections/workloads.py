"""What a real and a virtual GPU train: the course's CNN, ResNet-50, a small GPT; precisions.

Weights and batches come from the CPU's random numbers, so all devices get the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from multigpu import Gpu
from multigpu.models import CNN
from multigpu.models.resnet import resnet, stage
from multigpu.models.transformer import Block
from multigpu.virtual import control


class GPT(nn.Module):
    """Numbers of words (batch, sequence) → logits (batch, sequence, words)."""

    def __init__(self, layers: int, width: int, heads: int, length: int, words: int):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
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
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


def precisions(gpu: Gpu) -> list[str]:
    """fp32, and tf32 and bf16 if the GPU has such units; fp16 in place of a missing bf16."""
    tf32 = ["tf32"] if gpu.tf32 > gpu.fp32 else []
    return ["fp32", *tf32, "bf16" if gpu.bf16 else "fp16"]


@contextmanager
def computing(precision: str) -> Iterator[torch.dtype | None]:
    """Within the block, a real GPU computes in this precision; yields autocast's dtype."""
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = precision != "fp32"
        yield HALF.get(precision)
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


@contextmanager
def simulating(precision: str, gpu: Gpu) -> Iterator[torch.device]:
    """Within the block, a virtual GPU of this precision runs, with shapes only.

    A Gpu computes products in full float32 and convolutions in TF32, as PyTorch does by
    default. For "fp32" its convolutions are as fast as its products; for "tf32" the reverse.
    A product in TF32 is then simulated with the shares of CUDA cores.
    """
    if precision == "fp32":
        gpu = replace(gpu, tf32=gpu.fp32)
    elif precision == "tf32":
        # Just below, because equal peaks mean that the GPU has no TF32 units.
        gpu = replace(gpu, fp32=0.999 * gpu.tf32)
    with control.running(1, gpu=gpu, compute=False) as (device,):
        yield device
