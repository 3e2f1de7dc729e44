"""Device-side asserts: what a kernel of CUDA does with an index, or a number, that is wrong.

The kernel writes a line to stderr and ends, and the call of the operation returns. The host
notices at its next wait for the device (Meter.assert_error), and from then on each use of the
device raises the same error. With CUDA_LAUNCH_BLOCKING=1 the call itself raises it.

The payload's kernel, which raises on the CPU, finds the wrong number. The results that CUDA
leaves in an unknown state are shapes without numbers here: no kernel of the host then uses the
wrong index again, and no program sees them.
"""

import re
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from multigpu.virtual.ops.op_info import OpInfo
from multigpu.virtual.ops.shapes import drop_numbers
from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.sim import names
from multigpu.virtual.sim.memory import Meter

aten = torch.ops.aten
_INDEX = '-sizes[i] <= index && index < sizes[i] && "index out of bounds"'
_SCATTER = 'idx_dim >= 0 && idx_dim < index_size && "index out of bounds"'
_TAKE = 'idx < numel && idx >= -numel && "cuda_take_put_kernel() index out of bounds"'
_COPY = 'idx >= 0 && idx < self_dim_size && "index_copy_(): index out of bounds"'
_FILL = 'idx >= -self_dim_size && idx < self_dim_size && "Index out of bounds"'
_MARGIN = 'target_k >= 0 && target_k < dim && "target index is out of bounds"'
_MASKED = ("IndexKernel.cu", "masked_scatter_size_check", "totalElements <= srcSize")
_RATE = 'lambda >= 0 && "invalid Poisson rate, expected rate to be non-negative"'
_UNIT = "input_val >= zero && input_val <= one"
_PROBABILITY = "probability tensor contains either `inf`, `nan` or element < 0"

# (file, kernel, what it asserts) in torch's aten/src/ATen/native/cuda, by the operations that
# call it; "" for a text of the operation's own. The lines of files are those that an H100 has
# shown with torch 2.11; the others differ between versions of torch, and are left out.
_KERNELS: dict[tuple[str, str, str], tuple] = {
    ("IndexKernel.cu:111", "operator()", _INDEX): (
        *(aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_),
        *(aten._unsafe_index, aten._unsafe_index_put),
    ),
    ("IndexKernel.cu", "operator()", _TAKE): (aten.take, aten.put, aten.put_),
    ("IndexKernel.cu", "operator()", _COPY): (aten.index_copy, aten.index_copy_),
    ("IndexKernel.cu", "operator()", _FILL): (aten.index_fill, aten.index_fill_),
    ("ScatterGatherKernel.cu", "operator()", _SCATTER): (
        *(aten.gather, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_),
        *(aten.scatter_reduce, aten.scatter_reduce_),
    ),
    ("Indexing.cu:1515", "indexSelectSmallIndex", "srcIndex < srcSelectDimSize"): (
        *(aten.index_select, aten.embedding),
    ),
    ("Indexing.cu", "indexFuncSmallIndex", "dstIndex < dstAddDimSize"): (
        *(aten.index_add, aten.index_add_, aten.index_reduce, aten.index_reduce_),
    ),
    ("EmbeddingBag.cu", "EmbeddingBag_updateOutputKernel", "input_idx < numRows"): (
        *(aten._embedding_bag, aten._embedding_bag_forward_only),
    ),
    ("Loss.cu:245", "nll_loss_forward_reduce_cuda_kernel_2d", "t >= 0 && t < n_classes"): (
        aten.nll_loss_forward,
    ),
    ("NLLLoss2d.cu", "nll_loss2d_forward_kernel", "t >= 0 && t < n_classes"): (
        aten.nll_loss2d_forward,
    ),
    ("MultiMarginLoss.cu", "MultiMarginLoss_forward_kernel", _MARGIN): (
        aten.multi_margin_loss,
    ),
    _MASKED: (aten.masked_scatter, aten.masked_scatter_),
    ("Distributions.cu", "operator()", _RATE): (aten.poisson,),
    ("Loss.cu:90", "operator()", _UNIT): (aten.binary_cross_entropy,),
    ("DistributionBernoulli.cu", "operator()", "0 <= p4 && p4 <= 1"): (
        *(aten.bernoulli, aten.bernoulli_),
    ),
    ("MaxUnpooling.cu", "operator()", "maxind >= 0 && maxind < outputImageSize"): (
        *(aten.max_unpool2d, aten.max_unpool3d),
    ),
    ("Repeat.cu", "compute_cuda_kernel", "repeat >= 0"): (aten.repeat_interleave,),
    ("TensorCompare.cu:109", "_assert_async_cuda_kernel", ""): (
        *(aten.multinomial, aten._assert_async),
    ),
}
ASSERTS = {packet: kernel for kernel, packets in _KERNELS.items() for packet in packets}
# In the CPU's error: a wrong number, which CUDA's kernel finds. A wrong dimension, which the
# host finds on CUDA, too, has the first text.
_DIMENSION = re.compile(r"imension out of|Indexing dim")
_WRONG = re.compile(
    r"out of (bounds|range|DATA bounds)|valid range|found idx|should be between 0 and 1"
    r"|probabilit|p_in|invalid max index|can not be negative|number of ones|Poisson rate"
)


def asserts(info: OpInfo, error: Exception) -> bool:
    """Whether CUDA's kernel asserts where the CPU's has raised this error.

    Not if virtual GPUs do not look like CUDA.
    """
    packet = info.func.overloadpacket
    if names.shown_type() == names.INNER or packet not in ASSERTS:
        return False
    text = str(error)
    is_wrong = _WRONG.search(text) and not _DIMENSION.search(text)
    return packet is aten._assert_async or bool(is_wrong)


def results(
    info: OpInfo,
    payloads: list,
    kwargs: dict,
    tensors: list[VirtualTensor],
    meter: Meter,
    text: str,
) -> Any:
    """The results, without numbers, of an operation whose kernel asserts on CUDA.

    `text` is the CPU's error. Raises torch.AcceleratorError if the host waits for the
    operation.
    """
    packet = info.func.overloadpacket
    file, kernel, condition = ASSERTS[packet]
    print(
        f"/pytorch/aten/src/ATen/native/cuda/{file}: {kernel}: block: [0,0,0], thread: "
        f"[0,0,0] Assertion `{condition or _own_condition(text)}` failed.",
        file=sys.stderr,
    )
    meter.asserted = True
    # From now on, dispatch looks for payloads without numbers.
    meter.machine.compute = False
    if meter.launch_blocking or (info.host_waits and packet is not aten.index):
        raise meter.assert_error() from None
    shapes: dict[int, torch.Tensor] = {}
    if info.mutable:
        written = info.written_ids(payloads, kwargs)
        before = [tensor._payload for tensor in tensors]
        for tensor, payload in zip(tensors, before, strict=True):
            if id(payload) in written:
                drop_numbers(tensor)
                shapes[id(payload)] = tensor._payload
    args, kwargs = tree_map_only(
        torch.Tensor,
        lambda payload: shapes.get(id(payload), payload.to("meta")),
        (payloads, kwargs),
    )
    return info.kernel(*args, **kwargs)


def _own_condition(text: str) -> str:
    """What _assert_async_cuda_kernel says for the CPU's error."""
    if "probability" in text:
        return _PROBABILITY
    if text.startswith("Expected Tensor with single nonzero value"):
        return "input[0] != 0"
    return text.splitlines()[0]
