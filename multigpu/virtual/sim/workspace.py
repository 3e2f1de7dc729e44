"""The workspaces that PyTorch allocates for cuBLAS: part of a GPU's allocated memory.

Each thread and stream gets one at its first matrix product, so a first training step allocates
two: one in forward, and one in backward, which autograd executes in a thread of its own. They
stay until the process ends. Only programs that see CUDA (`multigpu virtual`) have them: the
numbers of the lessons' meters on "vgpu" are those of tensors alone.

Source: PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp; the H100 in benchmarks/gpu agrees.
"""

import os
import re

import torch

from multigpu.virtual.sim.gemm import PRODUCTS

aten = torch.ops.aten
# The operations that call cuBLAS. cuDNN's convolutions have their own workspaces, which
# PyTorch frees after each.
USERS = frozenset(PRODUCTS) | {
    aten._addmm_activation,
    aten.addbmm,
    aten.addmv,
    aten.dot,
    aten.mv,
    aten.vdot,
}
KIB = 1024


def workspace_bytes(capability: tuple[int, int]) -> int:
    """The bytes of one workspace on a GPU of this compute capability.

    CUBLAS_WORKSPACE_CONFIG changes it, such as ":4096:8": 8 pieces of 4,096 KiB.
    """
    pieces = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pieces:
        return sum(int(size) * int(count) * KIB for size, count in pieces)
    # Hopper and Blackwell: 32 MiB. Others: 8.125 MiB.
    return 8 * 4096 * KIB if capability[0] >= 9 else (2 * 4096 + 8 * 16) * KIB
