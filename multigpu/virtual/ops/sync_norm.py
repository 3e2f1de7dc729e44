"""The kernels of torch.nn.SyncBatchNorm, which torch has for CUDA only.

Each rank computes the mean and the inverse standard deviation of its own images. The ranks
exchange them with their counts, and combine them to those of the whole batch. Tensors with
channels have the shape (batch, channels, …), and statistics the shape (channels).

Source of the combined variance: Chan, Golub and LeVeque, "Algorithms for Computing the Sample
Variance" (The American Statistician 37(3), 1983), formula 2.1. Source of the gradients: Ioffe
and Szegedy, "Batch Normalization" (arXiv 1502.03167), section 3.
"""

import torch

from multigpu.virtual.ops.op_info import KernelFunction

aten = torch.ops.aten
Tensor = torch.Tensor
HALF = (torch.float16, torch.bfloat16)


def batch_norm_stats(images: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of each channel; in float32 for 16-bit images."""
    images = _in_full(images)
    variance, mean = torch.var_mean(images, _all_but_channels(images), correction=0)
    return mean, torch.rsqrt(variance + eps)


def gather_stats(
    images: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation over all ranks, and the running statistics.

    `means` and `invstds` are (ranks, channels), `counts` has the number of values of each
    rank. `images` are not used.
    """
    counts = counts.to(means.dtype).reshape(-1, 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variances = invstds**-2 - eps + (means - mean) ** 2
    variance = (variances * counts).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * (total / (total - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, torch.rsqrt(variance + eps)


def normalize(
    images: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    """The normalised images, times `weight` plus `bias`."""
    out = (images - _per_channel(mean, images)) * _per_channel(invstd, images)
    if weight is not None:
        out = out * _per_channel(weight, images)
    if bias is not None:
        out = out + _per_channel(bias, images)
    return out.to(images.dtype)


def backward_sums(
    grad: Tensor,
    images: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """This rank's sums of the gradient and of the gradient times the centred images.

    Also the gradients of weight and bias, or None.
    """
    grad = _in_full(grad)
    centred = images - _per_channel(mean, images)
    sum_grad = grad.sum(_all_but_channels(images))
    sum_grad_centred = (grad * centred).sum(_all_but_channels(images))
    dtype = sum_grad.dtype if weight is None else weight.dtype
    grad_weight = (sum_grad_centred * invstd).to(dtype) if weight_g else None
    grad_bias = sum_grad.to(dtype, copy=True) if bias_g else None
    return sum_grad, sum_grad_centred, grad_weight, grad_bias


def backward_images(
    grad: Tensor,
    images: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_grad: Tensor,
    sum_grad_centred: Tensor,
    counts: Tensor,
) -> Tensor:
    """The images' gradient; the sums are those of all ranks."""
    total = counts.sum().to(sum_grad.dtype)
    centred = images - _per_channel(mean, images)
    slope = invstd * invstd * sum_grad_centred / total
    factor = invstd if weight is None else invstd * weight
    shifted = grad - _per_channel(sum_grad / total, images)
    out = (shifted - centred * _per_channel(slope, images)) * _per_channel(factor, images)
    return out.to(images.dtype)


def _in_full(tensor: Tensor) -> Tensor:
    """16-bit numbers as float32, for sums."""
    return tensor.float() if tensor.dtype in HALF else tensor


def _all_but_channels(images: Tensor) -> list[int]:
    return [0, *range(2, images.dim())]


def _per_channel(values: Tensor, images: Tensor) -> Tensor:
    """Values (channels) in a shape that is broadcast to the images'."""
    return values.reshape(1, -1, *[1] * (images.dim() - 2))


KERNELS: dict[torch._ops.OpOverloadPacket, KernelFunction] = {
    aten.batch_norm_stats: batch_norm_stats,
    aten.batch_norm_gather_stats_with_counts: gather_stats,
    aten.batch_norm_elemt: normalize,
    aten.batch_norm_backward_reduce: backward_sums,
    aten.batch_norm_backward_elemt: backward_images,
}
