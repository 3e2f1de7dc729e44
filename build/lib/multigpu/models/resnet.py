"""ResNets without torchvision: networks of the published tables for the simulation.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), table 1, in the
form that torchvision and the tables use: the stride is in a block's 3×3 convolution. ResNet-50
has 25.6 million parameters, ResNet-101 44.5 and ResNet-152 60.2.
"""

import torch
from torch import nn


class Bottleneck(nn.Module):
    """A block of 1×1, 3×3 and 1×1 convolutions, which adds its input to their output.

    (n, c, h, w) → (n, 4·width, h/stride, w/stride)
    """

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride > 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False),
                nn.BatchNorm2d(4 * width),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


def stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """One of the four groups of blocks; only the first block has the stride."""
    first = Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)))


# The blocks in each of the four stages.
BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def halves(classes: int = 1000, layers: int = 50) -> tuple[nn.Sequential, nn.Sequential]:
    """The two parts of PyTorch's model-parallel tutorial: stages 1 and 2, stages 3 and 4."""
    blocks = BLOCKS[layers]
    first = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        stage(64, 64, blocks[0], 1),
        stage(256, 128, blocks[1], 2),
    )
    second = nn.Sequential(
        stage(512, 256, blocks[2], 2),
        stage(1024, 512, blocks[3], 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2048, classes),
    )
    return first, second


def resnet(layers: int, classes: int = 1000) -> nn.Sequential:
    """ResNet-50, -101 or -152: images (n, 3, h, w) → logits (n, classes)."""
    return nn.Sequential(*halves(classes, layers))
