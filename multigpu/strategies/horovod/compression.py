"""The form in which a gradient is sent."""

import torch


class Compression:
    """The choices for DistributedOptimizer(compression=…): from a gradient to what is sent."""

    @staticmethod
    def none(gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as it is."""
        return gradient

    @staticmethod
    def fp16(gradient: torch.Tensor) -> torch.Tensor:
        """Half the bytes of float32. Above 65504 a number, or the ranks' sum, is infinite."""
        return gradient.half() if gradient.is_floating_point() else gradient
