"""The numbers of a tensor, on the host."""

import torch


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the numbers of a DTensor's local part or of a virtual tensor."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "_payload", tensor)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's numbers as a dense tensor on the host, without autograd.

    A virtual GPU's numbers are on the host already: they are taken without an operation, so
    that the simulated clock and memory do not see it. Of a DTensor it is the local part.
    """
    tensor = bare(tensor).detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def number(tensor: object) -> float:
    """A tensor with one element, or a number, as a float."""
    if not isinstance(tensor, torch.Tensor):
        return float(tensor)
    return float(numbers(tensor).double().sum())
