"""Kernels that torch chooses for a GPU but not for the CPU, such as recurrent cells.

For a device other than the CPU, LSTM and GRU layers call fused cells. The cells in this file
implement the formulas in the documentation of torch.nn.LSTM and torch.nn.GRU, and their
derivatives. attention.py and sync_norm.py have the kernels of attention and of SyncBatchNorm.
"""

from collections.abc import Sequence
from typing import Any

import torch

from multigpu.virtual.ops.errors import convolution_type_error, on_vgpu, stopped_error
from multigpu.virtual.ops.op_info import Handler, KernelFunction
from multigpu.virtual.ops.tensor import VirtualTensor, wrap_new

aten = torch.ops.aten
Tensor = torch.Tensor
OpOverload = torch._ops.OpOverload


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of torch.nn.LSTM.

    Gates are (batch, 4·hidden), the cell state `cx` is (batch, hidden). Returns the new hidden
    state, the new cell state, and the workspace for backward.
    """
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        if bias is not None:
            gates = gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i = i.sigmoid()
    f = f.sigmoid()
    g = g.tanh()
    o = o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates, of the previous cell state, and of the biases."""
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    tanh = cy.tanh()
    grad = grad_hy * o * (1 - tanh * tanh)
    if grad_cy is not None:
        grad = grad + grad_cy
    gates = torch.cat(
        (
            grad * g * i * (1 - i),
            grad * cx * f * (1 - f),
            grad * i * (1 - g * g),
            grad_hy * tanh * o * (1 - o),
        ),
        1,
    )
    return gates, grad * f, gates.sum(0) if has_bias else gates.new_empty(0)


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of torch.nn.GRU.

    Gates are (batch, 3·hidden), the state `hx` is (batch, hidden). Returns the new state, and
    the workspace for backward.
    """
    if input_bias is not None:
        input_gates = input_gates + input_bias
    if hidden_bias is not None:
        hidden_gates = hidden_gates + hidden_bias
    ir, iz, inew = input_gates.chunk(3, 1)
    hr, hz, hnew = hidden_gates.chunk(3, 1)
    reset = (ir + hr).sigmoid()
    update = (iz + hz).sigmoid()
    new = (inew + reset * hnew).tanh()
    return (hx - new) * update + new, torch.cat((reset, update, new, hx, hnew), 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, ...]:
    """Gradients of input gates, hidden gates, previous state, and the two biases."""
    reset, update, new, hx, hnew = workspace.chunk(5, 1)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hnew * reset * (1 - reset)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    inputs = torch.cat((grad_reset, grad_update, grad_new), 1)
    hiddens = torch.cat((grad_reset, grad_update, grad_new * reset), 1)
    if has_bias:
        biases = (inputs.sum(0), hiddens.sum(0))
    else:
        biases = (inputs.new_empty(0), inputs.new_empty(0))
    return inputs, hiddens, grad_hy * update, *biases


def pack(func: OpOverload, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """aten::_pack_padded_sequence(rows, lengths, batch_first).

    Returns the rows packed by time step (on the device) and the number of rows in each step
    (on the host), as on CUDA. Raises RuntimeError if `lengths` is not on the host.
    """
    rows, lengths, _ = args
    if type(rows) is not VirtualTensor or type(lengths) is VirtualTensor:
        scalar_type = lengths.type().rpartition(".")[2].removesuffix("Tensor")
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D "
            f"{lengths.device} {scalar_type} tensor"
        )
    meter = rows._block.meter
    if not meter.alive:
        raise stopped_error(rows)
    payloads = [rows._payload, *args[1:]]
    data, sizes = func(*payloads)
    costs = meter.costs.seconds(func, payloads, kwargs, [rows], data)
    meter.machine.clock.compute(meter.index, "_pack_padded_sequence", *costs)
    return wrap_new(data, meter), sizes


def _keep_padding(func: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Handler of the check whether a padded batch can become a nested tensor: False.

    The CPU supports nested tensors, but on a virtual GPU the batch stays padded.
    """
    return False


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    *options: int | bool,
) -> Tensor:
    """torch.nn.functional.ctc_loss, with lengths on any device: the host reads them.

    CUDA's kernel does the same. `options` are blank, reduction and zero_infinity.
    """
    lengths = [
        value.tolist() if isinstance(value, Tensor) else value
        for value in (input_lengths, target_lengths)
    ]
    return aten.ctc_loss.IntList(log_probs, targets, *lengths, *options)


def _ctc_loss(func: OpOverload, args: tuple, kwargs: dict) -> Tensor:
    """Handler of ctc_loss in inference mode, where torch skips the kernel of `register`."""
    if func is aten.ctc_loss.Tensor:
        return ctc_loss(*args)
    return func.decompose(*args, **kwargs)


def one_hot(indices: Tensor, num_classes: int = -1) -> Tensor:
    """torch.nn.functional.one_hot as on CUDA: a class that does not exist is an error.

    For a tensor of a subclass torch compares numbers, and a row of such a class is zeros.
    """
    if indices.dtype is not torch.int64:
        # torch's wording, and below.
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if num_classes < 1 and not indices.numel():
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    if num_classes == -1:
        num_classes = indices.max().item() + 1
    if num_classes < 1:
        raise RuntimeError("num_classes should be positive")
    rows = indices.new_zeros(*indices.shape, num_classes)
    return rows.scatter_(-1, indices.unsqueeze(-1), 1)


def _one_hot(func: OpOverload, args: tuple, kwargs: dict) -> Tensor:
    """Handler of one_hot in inference mode, where torch skips the kernel of `register`."""
    return one_hot(*args, **kwargs)


def histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """aten::histc, for integers, too, as on CUDA; they are counted exactly below 2**53."""
    if values.dtype.is_floating_point:
        return aten.histc.default(values, bins, min, max)
    return aten.histc.default(values.double(), bins, min, max).to(values.dtype)


def convolution(images: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """aten::convolution: if the images have the channels last, so has the output.

    torch's kernel for tensors on "meta" would put the channels first. Raises CUDA's
    RuntimeError for images and weights of different dtypes.
    """
    if weight.dtype is not images.dtype:
        raise convolution_type_error(on_vgpu(images), "weight", on_vgpu(weight))
    if bias is not None and bias.dtype is not images.dtype:
        raise convolution_type_error(on_vgpu(images), "bias", on_vgpu(bias))
    return _like(images, aten.convolution.default(images, weight, bias, *args))


def convolution_backward(grad: Tensor, images: Tensor, *args: Any) -> tuple:
    """aten::convolution_backward: the gradient of the images has their memory format."""
    grads = aten.convolution_backward.default(grad, images, *args)
    return _like(images, grads[0]), *grads[1:]


def _like(images: Tensor, out: Tensor | None) -> Tensor | None:
    """A shape gets the channels last if the images have them last; others are unchanged."""
    if out is None or not out.is_meta or images.dim() != 4:
        return out
    if images.is_contiguous() or not images.is_contiguous(memory_format=torch.channels_last):
        return out
    return out.contiguous(memory_format=torch.channels_last)


def rms_norm_backward(
    grad: Tensor,
    rows: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input and of the weight of torch.nn.functional.rms_norm.

    `rstd` is 1 / sqrt(mean square + eps) of each row, in float32 for 16 bits: CUDA's kernel
    computes in that dtype, and rounds each gradient once.
    """
    last = rows.dim() - len(normalized_shape)
    dims = list(range(last, rows.dim()))
    grad = grad.to(rstd.dtype)
    normalized = rows.to(rstd.dtype) * rstd
    grad_rows = grad_weight = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * weight
        along = (scaled * normalized).mean(dims, keepdim=True)
        grad_rows = (rstd * (scaled - normalized * along)).to(rows.dtype)
    if output_mask[1] and weight is not None:
        of_rows = grad * normalized
        grad_weight = of_rows.sum(list(range(last))) if last else of_rows
        grad_weight = grad_weight.to(weight.dtype)
    return grad_rows, grad_weight


KERNELS: dict[torch._ops.OpOverloadPacket, KernelFunction] = {
    aten.convolution: convolution,
    aten.histc: histc,
    aten.convolution_backward: convolution_backward,
    aten._thnn_fused_lstm_cell: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl: lstm_cell_backward,
    aten._thnn_fused_gru_cell: gru_cell,
    aten._thnn_fused_gru_cell_backward: gru_cell_backward,
    # On the CPU, torch composes the first of other operations, and has no second.
    aten._fused_rms_norm: aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward: rms_norm_backward,
}
HANDLERS: dict[torch._ops.OpOverloadPacket, Handler] = {
    aten._pack_padded_sequence: pack,
    aten._nested_tensor_from_mask_left_aligned: _keep_padding,
    aten.ctc_loss: _ctc_loss,
    aten.one_hot: _one_hot,
}


def register(library: torch.library.Library) -> None:
    """Replace torch's kernels of ctc_loss and one_hot for the device type "vgpu"."""
    library.impl("ctc_loss.Tensor", ctc_loss, "AutogradPrivateUse1")
    library.impl("one_hot", one_hot, "AutogradPrivateUse1")
