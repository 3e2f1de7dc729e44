"""torch.nn.functional.scaled_dot_product_attention on virtual GPUs.

For a device other than the CPU, torch's attention would use its slowest kernel. `attention`
uses the kernel that the CPU chooses, so its results equal the CPU's bit for bit. The CPU has
one fused kernel, which stands for all the fused kernels of a GPU.
"""

import torch
from torch.nn.attention import SDPBackend

from multigpu.virtual.ops.errors import check_attention
from multigpu.virtual.ops.op_info import Handler, KernelFunction
from multigpu.virtual.ops.tensor import VirtualTensor

aten = torch.ops.aten
Tensor = torch.Tensor
OpOverload = torch._ops.OpOverload
HALF = (torch.float16, torch.bfloat16)
# The widest head that CUDA's flash attention takes.
MAX_FLASH_WIDTH = 256


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
    """torch.nn.functional.scaled_dot_product_attention, with the CPU's choice of kernel.

    Raises CUDA's RuntimeError for tensors of two devices, and if `sdpa_kernel` allows only
    kernels that do not take the call.
    """
    check_attention(query, key, value, attn_mask)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    fused = _is_fused_allowed(query, attn_mask)
    tensors = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    if any(type(tensor) is not VirtualTensor for tensor in tensors):
        if fused and dropout_p == 0 and _are_wrappers(tensors):
            return _attention_of_wrappers(query, key, value, attn_mask, is_causal, scale)
    elif fused and _uses_flash(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    ):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _is_fused_allowed(query: Tensor, mask: Tensor | None) -> bool:
    """Whether `torch.nn.attention.sdpa_kernel` allows a fused kernel of a GPU.

    Raises RuntimeError if it allows no kernel, or none that takes these tensors.
    """
    flash = torch._C._get_flash_sdp_enabled()
    efficient = torch._C._get_mem_efficient_sdp_enabled()
    cudnn = torch._C._get_cudnn_sdp_enabled()
    if torch._C._get_math_sdp_enabled():
        return flash or efficient or cudnn
    if not (flash or efficient or cudnn):
        # CUDA's wording, and below.
        raise RuntimeError(
            "No viable backend for scaled_dot_product_attention was found. This is likely "
            "due to turning off both the math kernel and the fused kernels."
        )
    in_half = query.dtype in HALF
    takes_call = (
        (flash and in_half and mask is None and query.shape[-1] <= MAX_FLASH_WIDTH)
        or (efficient and (in_half or query.dtype is torch.float32))
        or (cudnn and in_half)
    )
    if not takes_call:
        raise RuntimeError("No available kernel. Aborting execution.")
    return True


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
    """Whether the CPU would choose its flash kernel for these arguments, if it is allowed."""
    if query.dim() != 4 or dropout_p > 0:
        return False
    if not query.numel() or not key.numel():
        # With no heads, the flash kernel divides by zero.
        return False
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        # The flash kernel has no gradient for its mask.
        return False
    if not query._block.meter.machine.compute:
        return not enable_gqa
    payloads = [
        None if tensor is None else tensor._payload for tensor in (query, key, value, mask)
    ]
    # The CPU's kernel also stands for a GPU's other fused kernels.
    was_allowed = torch._C._get_flash_sdp_enabled()
    torch._C._set_sdp_use_flash(True)
    try:
        choice = torch._fused_sdp_choice(
            *payloads, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    finally:
        torch._C._set_sdp_use_flash(was_allowed)
    return choice == SDPBackend.FLASH_ATTENTION.value


def _are_wrappers(tensors: list[Tensor]) -> bool:
    """Whether wrappers such as DTensor have to handle the call, with four dimensions each."""
    query, key, value = tensors[:3]
    return (
        any(torch.utils._python_dispatch.is_traceable_wrapper_subclass(t) for t in tensors)
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
    )


def _attention_of_wrappers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of wrappers such as DTensor, which have rules for this kernel of CUDA's.

    torch's decomposition would make a causal mask that is no wrapper.
    """
    heads = query.shape[1]
    if key.shape[1] != heads:
        key, value = (_repeat_heads(tensor, heads) for tensor in (key, value))
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
    grad = torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, grad, 0.0, is_causal, scale=scale
    )[0]


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: each head of keys or values serves several of the queries."""
    batch, groups, rows, width = tensor.shape
    tensor = tensor[:, :, None].expand(batch, groups, heads // groups, rows, width)
    return tensor.reshape(batch, heads, rows, width)


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CUDA's memory-efficient attention without dropout, with the CPU's fused kernel.

    Returns the result, the logarithms of the sums of exponentials, and two numbers that would
    restore the random state.
    """
    if dropout_p:
        raise NotImplementedError("the fused kernel of the CPU has no dropout")
    out, log_sumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_bias, scale=scale
    )
    seed = torch.zeros((), dtype=torch.int64)
    return out, log_sumexp, seed, seed.clone()


def efficient_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    log_sumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and bias."""
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, log_sumexp, 0.0, is_causal,
        attn_mask=attn_bias, scale=scale,
    )  # fmt: skip
    if attn_bias is None or not grad_input_mask[3]:
        return *grads, None
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * factor + attn_bias
    weights = (scores - log_sumexp[..., None]).exp()
    grad_weights = grad @ value.mT - (grad * out).sum(-1, keepdim=True)
    return *grads, (weights * grad_weights).to(attn_bias.dtype)


def _attention(func: OpOverload, args: tuple, kwargs: dict) -> Tensor:
    """Handler of attention in inference mode, where torch skips the kernel of `register`."""
    return attention(*args, **kwargs)


KERNELS: dict[torch._ops.OpOverloadPacket, KernelFunction] = {
    aten._scaled_dot_product_efficient_attention: efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward: efficient_attention_backward,
}
HANDLERS: dict[torch._ops.OpOverloadPacket, Handler] = {
    aten.scaled_dot_product_attention: _attention,
}


def register(library: torch.library.Library) -> None:
    """Replace torch's kernel of attention for the device type "vgpu"."""
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
