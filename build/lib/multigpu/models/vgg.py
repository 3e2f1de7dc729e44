"""VGG-16: 138 million weights, of which 124 million are in three linear layers.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition"
(2015), table 1, column D. It computes little for each weight, so its gradients take long to
send.
"""

from torch import nn

# The channels of the convolutions, in groups with a max-pooling after each.
GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(classes: int = 1000) -> nn.Sequential:
    """Images (n, 3, 224, 224) → logits (n, classes)."""
    layers: list[nn.Module] = []
    channels = 3
    for group in GROUPS:
        for width in group:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    layers.append(nn.Linear(4096, classes))
    return nn.Sequential(*layers)
