"""What is trained: a model, the samples of a step, the loss and the optimizer, by name.

    cnn                      the course's CNN on 8×8 images
    cnn:wide                 the CNN of lesson 03's sweeps: 28×28 images, 320 hidden units
    resnet50, resnet101, resnet152, vgg16      on 224×224 images
    gpt:24x2304x24           layers × hidden units × heads; a fourth number is the tokens of a
                             sequence, 1,024 without it
    bert:base, bert:large, bert:12x768x12      the same; 512 tokens without a fourth number

Images are trained with SGD and momentum, texts with Adam. All tensors have shapes only.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from multigpu.errors import UserError
from multigpu.models import CNN
from multigpu.models.resnet import resnet
from multigpu.models.transformer import Transformer, bert, gpt
from multigpu.models.vgg import vgg16

WIDE = {"image_shape": (1, 28, 28), "hidden": 320}
BERT_SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16)}
NAMES = (
    "cnn", "cnn:wide", "resnet50", "resnet101", "resnet152", "vgg16", "gpt:24x2304x24",
    "bert:base", "bert:large", "bert:12x768x12",
)  # fmt: skip
# Sizes above these are typing errors, or take minutes.
MOST_LAYERS = 1_000
MOST_HIDDEN = 200_000
MOST_TOKENS = 1_000_000


@dataclass(frozen=True)
class Workload:
    """One training step, of any number of samples.

    name     as in NAMES
    sample   the word for a sample: "image" or "sequence"
    batch    the samples of a GPU's step, if the user gives none
    build    returns the model with a number of layers (None: all); its parameters have no
             numbers if called in `with torch.device("meta")`
    inputs   returns the model's input for (samples, device)
    labels   the shape of one sample's labels
    adam     whether the optimizer is Adam
    layers   the number of equal layers; their parameters' names begin with "blocks.NUMBER.".
             0 for a model whose layers differ
    """

    name: str
    sample: str
    batch: int
    build: Callable[[int | None], nn.Module]
    inputs: Callable[[int, torch.device], torch.Tensor]
    labels: tuple[int, ...] = ()
    adam: bool = False
    layers: int = 0

    def loss(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Forward and loss of one batch."""
        shape = (len(inputs), *self.labels)
        labels = torch.empty(shape, dtype=torch.long, device=inputs.device)
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam, or SGD with momentum, over all parameters."""
        if self.adam:
            return torch.optim.Adam(model.parameters())
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def find(name: str) -> Workload:
    """The workload with this name. Raises UserError for an unknown name or size."""
    kind, _, size = name.partition(":")
    if name in ("cnn", "cnn:wide"):
        settings = WIDE if size else {}
        shape = settings.get("image_shape", (1, 8, 8))
        return _images(name, lambda _: CNN(**settings), shape, batch=256 if size else 32)
    if name in ("resnet50", "resnet101", "resnet152"):
        number = int(name.removeprefix("resnet"))
        return _images(name, lambda _: resnet(number), (3, 224, 224), batch=64)
    if name == "vgg16":
        return _images(name, lambda _: vgg16(), (3, 224, 224), batch=64)
    if kind in ("gpt", "bert") and size:
        return _texts(name, kind, size)
    raise UserError(f"there is no model {name!r}: use one of {', '.join(NAMES)}.")


def _images(
    name: str, build: Callable[[int | None], nn.Module], shape: tuple[int, ...], batch: int
) -> Workload:
    def inputs(samples: int, device: torch.device) -> torch.Tensor:
        return torch.empty(samples, *shape, device=device)

    return Workload(name, "image", batch, build, inputs)


def _texts(name: str, kind: str, size: str) -> Workload:
    if kind == "bert" and size in BERT_SIZES:
        numbers = BERT_SIZES[size]
    elif re.fullmatch(r"\d+x\d+x\d+(x\d+)?", size):
        numbers = tuple(map(int, size.split("x")))
    else:
        raise UserError(
            f"the size in {name!r} cannot be read: give layers × hidden units × heads, as "
            f"in {kind}:24x2304x24; a fourth number is the tokens of a sequence."
        )
    layers, hidden, heads, *rest = numbers
    if not 1 <= layers <= MOST_LAYERS or not 1 <= hidden <= MOST_HIDDEN or heads < 1:
        raise UserError(
            f"the size in {name!r} is out of range: layers are from 1 to {MOST_LAYERS:,}, "
            f"hidden units from 1 to {MOST_HIDDEN:,}, heads from 1 up."
        )
    if hidden % heads:
        raise UserError(
            f"{name!r} has {hidden} hidden units, which {heads} heads cannot share evenly: "
            f"give a number of heads that divides {hidden}."
        )
    if rest and not 1 <= rest[0] <= MOST_TOKENS:
        raise UserError(
            f"{name!r} has sequences of {rest[0]} tokens: give from 1 to {MOST_TOKENS:,}."
        )
    make = gpt if kind == "gpt" else bert
    sizes = {"hidden": hidden, "heads": heads}
    if rest:
        sizes["tokens"] = rest[0]
    with torch.device("meta"):
        probe: Transformer = make(1, **sizes)
    tokens = probe.places.num_embeddings

    def build(count: int | None) -> nn.Module:
        return make(layers if count is None else count, **sizes)

    def inputs(samples: int, device: torch.device) -> torch.Tensor:
        return torch.empty(samples, tokens, dtype=torch.long, device=device)

    batch = 8
    return Workload(
        name, "sequence", batch, build, inputs, (probe.predicted,), adam=True, layers=layers
    )
