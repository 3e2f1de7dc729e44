"""Which model do all routes train? One small CNN, so that they can be compared."""

import torch
from torch import nn


class CNN(nn.Module):
    """Two convolutions and two linear layers: images (batch, channels, height, width) → logits (batch, classes).

    It is smooth on purpose: tanh, and a stride in the place of max-pooling. Two routes differ in the order of their
    sums, so in the last bit; at a kink (ReLU, max) a last bit can decide between two ways, and after a hundred steps
    the weights are far apart although neither route is wrong. No BatchNorm: it would see each rank's part alone.
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
