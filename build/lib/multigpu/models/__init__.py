"""Models: the CNN that all routes train, and the networks of published tables.

    from multigpu.models import CNN
    from multigpu.models.resnet import resnet
    from multigpu.models.transformer import gpt

ResNet, VGG and the transformers are built to be simulated: no weights, no preprocessing.
"""

from multigpu.models.cnn import CNN

__all__ = ["CNN"]
