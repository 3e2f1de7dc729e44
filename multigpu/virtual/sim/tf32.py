"""TF32: whether the program lets a GPU compute float32 with ten bits of fraction.

PyTorch asks for TF32 in convolutions by default, and in matrix products only after
`torch.set_float32_matmul_precision("high")` or one of the switches in torch.backends (PyTorch,
"CUDA semantics: TensorFloat-32"). The virtual GPU computes the numbers in full float32 in both
cases: only the time changes.
"""

import torch

from multigpu.virtual.sim import conv


def allowed(packet: torch._ops.OpOverloadPacket) -> bool:
    """Whether a convolution or a product in float32 may run on TF32 units, by the switches."""
    if packet in (conv.FORWARD, conv.BACKWARD):
        return torch.backends.cudnn.conv.fp32_precision == "tf32"
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
