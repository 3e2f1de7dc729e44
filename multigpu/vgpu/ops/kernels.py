"""Kernels that torch chooses for a GPU but not for the CPU: recurrent cells, attention.

For a device other than the CPU, LSTM and GRU layers call fused cells. The cells in this file
implement the formulas in the documentation of torch.nn.LSTM and torch.nn.GRU, and their
derivatives. For such a device, torch's attention would use its slowest kernel. `attention`
uses the kernel that the CPU chooses, so its results equal the CPU's bit for bit.
"""

from collections.abc import Sequence

import torch

from multigpu.vgpu.ops.errors import stopped_error
from multigpu.vgpu.ops.op_info import Handler, Kernel
from multigpu.vgpu.ops.tensor import VirtualTensor, wrap_new

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
    i, f, g, o = _sum(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1)
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


def _sum(first: Tensor, second: Tensor, *biases: Tensor | None) -> Tensor:
    total = first + second
    for bias in biases:
        if bias is not None:
            total = total + bias
    return total


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with the CPU's choice of kernel."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    if _uses_flash(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _uses_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether the CPU would choose its flash kernel for these arguments."""
    tensors = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    if any(type(tensor) is not VirtualTensor for tensor in tensors):
        # The other kernel raises the error for tensors of two devices.
        return False
    if query.dim() != 4 or dropout_p > 0:
        return False
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        # The flash kernel has no gradient for its mask.
        return False
    if not query._block.meter.machine.compute:
        return not enable_gqa
    payloads = [
        None if tensor is None else tensor._payload for tensor in (query, key, value, mask)
    ]
    choice = torch._fused_sdp_choice(
        *payloads, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value


def _attention(func: OpOverload, args: tuple, kwargs: dict) -> Tensor:
    """Handler of attention in inference mode, where torch skips the kernel of `register`."""
    return attention(*args, **kwargs)


def pack(func: OpOverload, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """aten::_pack_padded_sequence(rows, lengths, batch_first).

    Returns the rows packed by time step (on the device) and the number of rows in each step
    (on the host), as on CUDA. Raises RuntimeError if `lengths` is not on the host.
    """
    rows, lengths, _ = args
    if type(rows) is not VirtualTensor or type(lengths) is VirtualTensor:
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got a tensor on "
            f"{lengths.device}"
        )
    meter = rows._block.meter
    if not meter.alive:
        raise stopped_error(rows)
    payloads = [rows._payload, *args[1:]]
    data, sizes = func(*payloads)
    seconds = meter.machine.costs.seconds(func, payloads, kwargs, [rows], data)
    meter.machine.clock.compute(meter.index, "_pack_padded_sequence", seconds)
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


KERNELS: dict[torch._ops.OpOverloadPacket, Kernel] = {
    aten._thnn_fused_lstm_cell: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl: lstm_cell_backward,
    aten._thnn_fused_gru_cell: gru_cell,
    aten._thnn_fused_gru_cell_backward: gru_cell_backward,
}
HANDLERS: dict[torch._ops.OpOverloadPacket, Handler] = {
    aten.scaled_dot_product_attention: _attention,
    aten._pack_padded_sequence: pack,
    aten._nested_tensor_from_mask_left_aligned: _keep_padding,
    aten.ctc_loss: _ctc_loss,
}


def register(library: torch.library.Library) -> None:
    """Replace torch's kernels of attention and ctc_loss for the device type "vgpu"."""
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    library.impl("ctc_loss.Tensor", ctc_loss, "AutogradPrivateUse1")
