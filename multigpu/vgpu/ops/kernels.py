"""Which kernels does torch choose for a GPU that the CPU does not have? Recurrent cells and attention, given here.

For a device that is not the CPU, LSTM and GRU layers call fused cells. They are written out below from the layers' own
formulas (torch.nn.LSTM, torch.nn.GRU), with their derivatives. Attention would take its slowest path; here it takes
the CPU's choice, so that its numbers are the CPU's to the bit.
"""

import torch

from multigpu.vgpu.ops.errors import stopped
from multigpu.vgpu.ops.op_info import HANDLERS, KERNELS
from multigpu.vgpu.ops.tensor import VirtualTensor, place

aten = torch.ops.aten
Tensor = torch.Tensor


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, 4·hidden) gates and (batch, hidden) cells → hidden state, cell state, and what backward needs."""
    i, f, g, o = _sum(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
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
    """Gradients of the gates, of the old cell state, and of the biases."""
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
    """(batch, 3·hidden) gates and (batch, hidden) states → new states, and what backward needs."""
    ir, iz, inew = (input_gates if input_bias is None else input_gates + input_bias).chunk(
        3, 1
    )
    hr, hz, hnew = (hidden_gates if hidden_bias is None else hidden_gates + hidden_bias).chunk(
        3, 1
    )
    reset, update = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (inew + reset * hnew).tanh()
    return (hx - new) * update + new, torch.cat((reset, update, new, hx, hnew), 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, ...]:
    """Gradients of the input's gates, of the hidden state's gates, of the old state, and of the two biases."""
    reset, update, new, hx, hnew = workspace.chunk(5, 1)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hnew * reset * (1 - reset)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    inputs = torch.cat((grad_reset, grad_update, grad_new), 1)
    hiddens = torch.cat((grad_reset, grad_update, grad_new * reset), 1)
    biases = (
        (inputs.sum(0), hiddens.sum(0))
        if has_bias
        else (inputs.new_empty(0), inputs.new_empty(0))
    )
    return inputs, hiddens, grad_hy * update, *biases


def _sum(first: Tensor, second: Tensor, *biases: Tensor | None) -> Tensor:
    total = first + second
    for bias in biases:
        if bias is not None:
            total = total + bias
    return total


KERNELS.update(
    {
        aten._thnn_fused_lstm_cell: lstm_cell,
        aten._thnn_fused_lstm_cell_backward_impl: lstm_cell_backward,
        aten._thnn_fused_gru_cell: gru_cell,
        aten._thnn_fused_gru_cell_backward: gru_cell_backward,
    }
)


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
    """torch.nn.functional.scaled_dot_product_attention, by the CPU's flash kernel where the CPU would take it."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            ~attn_mask, -torch.inf
        )
    if _flash(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _flash(
    query, key, value, mask, dropout_p: float, is_causal: bool, scale: float | None, gqa: bool
) -> bool:
    tensors = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    if (
        any(type(tensor) is not VirtualTensor for tensor in tensors)
        or query.dim() != 4
        or dropout_p > 0
    ):
        return False  # tensors of two devices get their error on the way
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return False  # as on the CPU: the flash kernel has no gradient for its mask
    if not query._block.meter.machine.compute:
        return not gqa
    payloads = [
        None if tensor is None else tensor._payload for tensor in (query, key, value, mask)
    ]
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    return (
        torch._fused_sdp_choice(*payloads, dropout_p, is_causal, scale=scale, enable_gqa=gqa)
        == flash
    )


HANDLERS[aten.scaled_dot_product_attention] = lambda func, args, kwargs: attention(
    *args, **kwargs
)  # inference_mode


def pack(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """Rows packed by time step, on the device; and the number of rows in each step, on the host, as on CUDA."""
    rows, lengths, _ = args
    if type(rows) is not VirtualTensor or type(lengths) is VirtualTensor:
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got a tensor on {lengths.device}"
        )
    meter = rows._block.meter
    if not meter.alive:
        raise stopped(rows)
    data, sizes = func(rows._payload, *args[1:])
    seconds = meter.machine.costs.seconds(
        func, [rows._payload, *args[1:]], kwargs, [rows], data
    )
    meter.machine.clock.compute(meter.index, "_pack_padded_sequence", seconds)
    return place(data, meter), sizes


HANDLERS[aten._pack_padded_sequence] = pack
# A padding mask may turn a batch into a nested tensor on the CPU; on a virtual GPU it stays padded.
HANDLERS[aten._nested_tensor_from_mask_left_aligned] = lambda func, args, kwargs: False


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths, target_lengths, *options
) -> Tensor:
    """torch.nn.functional.ctc_loss: the host reads the lengths, wherever they lie, as for CUDA's own kernel."""
    lengths = (
        part.tolist() if isinstance(part, Tensor) else part
        for part in (input_lengths, target_lengths)
    )
    return aten.ctc_loss.IntList(log_probs, targets, *lengths, *options)


def _ctc_loss(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict
) -> Tensor:  # inference_mode
    return ctc_loss(*args) if func is aten.ctc_loss.Tensor else func.decompose(*args, **kwargs)


HANDLERS[aten.ctc_loss] = _ctc_loss


def register(library: torch.library.Library) -> None:
    """Put attention and this loss in the place of torch's choice for this device type."""
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    library.impl("ctc_loss.Tensor", ctc_loss, "AutogradPrivateUse1")
