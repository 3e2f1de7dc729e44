"""What PyTorch costs the host for each operation in eager mode.

The host runs Python, chooses a kernel, allocates the result and launches the kernel. It does
this for all operations, large or small, so a program with small tensors takes as long as its
host (the GPU is launch-bound).

Two kinds of operations differ. A simple one (elementwise, a copy, a sum) is one call of torch
with one launch. An operation of a layer (a convolution, a matrix product, a normalisation, a
pooling, a softmax, attention) runs a module's Python, and a library's choice of an algorithm.
"""

import torch

from multigpu.virtual.sim.presets import LAUNCH_OVERHEAD

# Seconds for a simple operation. PyTorch's issue 41383 measures 7 µs for `2 * x` on the CPU;
# a launch takes 2 to 4 µs more (issue 82793: "4 us per op on CUDA").
SIMPLE = LAUNCH_OVERHEAD
# Seconds for a layer's operation. PyTorch's issue 82793 measures EfficientNet-B5 with batch 1
# on an A100: 583 operations in 17.8 ms, bound by the host, so 31 µs each. About half of them
# are convolutions and normalisations: (583 · 31 µs - 291 · SIMPLE) / 292 = 51 µs.
LAYER = 51e-6
LAYERS = (
    "convolution",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "addmm",
    "softmax",
    "attention",
    "pool",
    "embedding",
    "native_dropout",
    "nll_loss",
    "cell",
)


def host_seconds(func: torch._ops.OpOverload) -> float:
    """Seconds of the host for one call."""
    name = func.overloadpacket.__name__
    # Not every name with "mm" is a product's: lgamma, cummax.
    is_layer = name.endswith("mm") or any(part in name for part in LAYERS)
    return LAYER if is_layer and not name.startswith("_foreach") else SIMPLE
