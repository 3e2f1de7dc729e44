"""Compression: the form in which a gradient is sent."""

import torch


class Compression:
    """Choices for DistributedOptimizer(compression=…): each returns the tensor to send."""

    @staticmethod
    def none(gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as it is."""
        return gradient

    @staticmethod
    def fp16(gradient: torch.Tensor) -> torch.Tensor:
        """The gradient in float16: half the bytes of float32.

        A number above 65504 becomes infinite; so does a sum over the ranks above 65504.
        """
        return gradient.half() if gradient.is_floating_point() else gradient
