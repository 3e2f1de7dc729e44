"""The model that all routes train: one small CNN, which makes the routes comparable."""

import torch
from torch import nn


class CNN(nn.Module):
    """Two convolutions and two linear layers.

    Images (batch, channels, height, width) → logits (batch, classes).

    It is smooth on purpose: it has tanh, and a stride instead of max-pooling. Two routes add
    the same numbers in different orders, so their results differ in the last bit. At a kink
    (ReLU, max) the last bit can select the other branch; after a hundred steps the weights are
    far apart, although both routes are correct. It has no BatchNorm, which would see only each
    rank's shard of the batch.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 8, 8),
        classes: int = 10,
        hidden: int = 64,
    ):
        super().__init__()
        self.image_shape = image_shape
        channels, height, width = image_shape
        self.conv1 = nn.Conv2d(channels, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2)
        self.fc1 = nn.Linear(32 * ((height + 1) // 2) * ((width + 1) // 2), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv1(images))
        x = torch.tanh(self.conv2(x))
        x = torch.tanh(self.fc1(x.flatten(1)))
        return self.fc2(x)
