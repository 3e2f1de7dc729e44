"""The errors that a GPU raises, in CUDA's wording if CUDA has the error."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torchgen

from multigpu.virtual.ops.generator import device_of
from multigpu.virtual.ops.op_info import INDEXING, OpInfo
from multigpu.virtual.ops.tensor import VirtualTensor, last_element
from multigpu.virtual.sim import contents, names
from multigpu.virtual.sim.machine import forked_error

aten = torch.ops.aten
Tensor = torch.Tensor
# What a program does when it reads numbers, by torch's names of the operations.
READS = {"_local_scalar_dense": "a decision", "_to_copy": "a copy to the host"}


def check_has_numbers(info: OpInfo, tensors: list[VirtualTensor]) -> None:
    """Raise RuntimeError if a tensor is a shape without numbers, as with compute=False."""
    if any(tensor._payload.is_meta for tensor in tensors):
        raise no_numbers_error(READS.get(info.name, info.name))


def no_numbers_error(use: str) -> RuntimeError:
    """The error for a use of numbers, such as "numpy()", where tensors have only shapes.

    It names the line of the program that asks.
    """
    if names.shown_type() == names.INNER:
        mode, change = "compute=False", "start the virtual GPUs with compute=True"
    else:
        mode, change = "--shapes-only", "run without --shapes-only"
    return RuntimeError(
        f"{_program_line()}{use} needs numbers, but with {mode} the tensors of virtual GPUs "
        f"have only shapes: {change}, or leave this out."
    )


def _program_line() -> str:
    """The line of the program that called a library, "train.py, line 3: "; "" without one."""
    line = contents.program_line(sys._getframe(1))
    return f"{os.path.basename(line[0])}, line {line[1]}: " if line else ""


def check_storages(tensors: list[VirtualTensor]) -> None:
    """Raise RuntimeError if a program has made a tensor's storage too small for the tensor.

    A kernel would read and write memory outside of the storage.
    """
    for tensor in tensors:
        if id(tensor._block) not in tensor._block.meter.shrunk or not tensor.numel():
            continue
        needed = (last_element(tensor) + 1) * tensor.itemsize
        nbytes = tensor._payload.untyped_storage().nbytes()
        if nbytes < needed:
            raise RuntimeError(
                f"A tensor on {tensor.device} needs {needed} bytes of its storage, but the "
                f"storage has been resized to {nbytes} bytes, as FSDP does with parameters "
                f"that are not gathered: resize it before you use the tensor."
            )


def device_mismatch_error(
    info: OpInfo,
    func: torch._ops.OpOverload,
    args: tuple,
    first: torch.device,
    second: torch.device,
) -> RuntimeError:
    """CUDA's error for tensors of two devices in one operation.

    Some operations have a sentence of their own. Those that PyTorch's dispatcher does not
    check leave it to TensorIterator, which names the two devices. For the rest, the message
    names the first argument whose device is not that of the argument before it, as PyTorch
    does since version 2.9; what has no argument of two devices (out=, lists) is on the
    `second`.
    """
    sentence_of = OWN_SENTENCES.get(func.overloadpacket)
    if sentence_of is not None and (sentence := sentence_of(args)):
        return RuntimeError(sentence)
    declared = _declaration(func.overloadpacket.__name__, func._schema.overload_name)
    unchecked = "NoCheck" in declared or (info.pointwise and not declared)
    if unchecked or func.overloadpacket in OF_TENSOR_ITERATOR or _is_bias_apart(func, args):
        return RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{first} and {second}!"
        )
    kernel, arguments = _cuda_kernel(func, args)
    common, wrong, place = first, "out", second
    devices = list(_devices(arguments, args))
    for name, device in devices:
        if device != devices[0][1]:
            common, wrong, place = devices[0][1], name, device
            break
    return RuntimeError(
        f"Expected all tensors to be on the same device, but got {wrong} is on {place}, "
        f"different from other tensors on {common} (when checking argument in method "
        f"wrapper_{names.shown_type().upper()}_{kernel})"
    )


def _devices(arguments: Sequence[str], args: tuple) -> Iterator[tuple[str, torch.device]]:
    """(argument's name, device) of each tensor among an operation's arguments."""
    for name, value in zip(arguments, args, strict=False):
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, Tensor):
                yield name, part.device


# These call operations of TensorIterator, such as x == y.
OF_TENSOR_ITERATOR = {aten.allclose, aten.ldexp, aten.ldexp_}
# The arguments of cuDNN's convolution, which leaves out the bias.
CONVOLVED = ("self", "weight")
# What these operations call on CUDA, and its tensors.
CALLS = {
    aten.embedding: ("_index_select", ("self", "index")),
    aten.stack: ("cat", ("tensors",)),
}


def _cuda_kernel(func: torch._ops.OpOverload, args: tuple) -> tuple[str, Sequence[str]]:
    """The name of CUDA's kernel as error messages have it, and its arguments' names."""
    if func.overloadpacket is aten.convolution:
        return "_cudnn_convolution_transpose" if args[6] else "_cudnn_convolution", CONVOLVED
    if func.overloadpacket in CALLS:
        return CALLS[func.overloadpacket]
    arguments = func._schema.arguments
    name, overload = func.overloadpacket.__name__, func._schema.overload_name
    if any(argument.is_out for argument in arguments):
        name += "_out"
    if "  structured" in _declaration(func.overloadpacket.__name__, overload):
        name += f"_{overload}" if overload else ""
    else:
        name = f"{overload}_{name}"
    return name, [argument.name for argument in arguments]


@functools.cache
def _declaration(name: str, overload: str) -> str:
    """An operation's entry in PyTorch's native_functions.yaml; "" if it has none."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    full = re.escape(f"{name}.{overload}" if overload else name)
    entry = re.search(rf"- func: {full}\(.*?(?=\n- func|\Z)", path.read_text(), re.DOTALL)
    return entry.group(0) if entry else ""


def _convolution_sentence(args: tuple) -> str | None:
    """CUDA's sentence for a convolution of tensors of the host and of a GPU."""
    images, weight, bias = args[:3]
    if weight.device.type != images.device.type:
        return _type_sentence(images.type(), "weight", weight.type())
    if bias is not None and bias.device.type != images.device.type:
        return _type_sentence(images.type(), "bias", bias.type())
    return None


def _is_bias_apart(func: torch._ops.OpOverload, args: tuple) -> bool:
    """Whether only a convolution's bias is on another GPU: CUDA adds it after the product."""
    return func.overloadpacket is aten.convolution and args[0].device == args[1].device


def _masked_fill_sentence(args: tuple) -> str | None:
    tensor, mask = args[:2]
    if mask.device != tensor.device:
        return (
            f"expected self and mask to be on the same device, but got mask on {mask.device} "
            f"and self on {tensor.device}"
        )
    # The value is on a GPU.
    return "masked_fill_: Expected inputs to be on same device" if tensor.is_cpu else None


def _index_sentence(args: tuple) -> str:
    return (
        f"indices should be either on cpu or on the same device as the indexed tensor "
        f"({args[0].device})"
    )


def _cholesky_solve_sentence(args: tuple) -> str:
    return (
        f"Expected b and A to be on the same device, but found b on {args[0].device} and A on "
        f"{args[1].device} instead."
    )


# CUDA's own sentences, from the arguments of the operation; None for the common one.
OWN_SENTENCES: dict[torch._ops.OpOverloadPacket, Callable[[tuple], str | None]] = {
    aten.convolution: _convolution_sentence,
    aten.masked_fill: _masked_fill_sentence,
    aten.masked_fill_: _masked_fill_sentence,
    aten.index: _index_sentence,
    aten.cholesky_solve: _cholesky_solve_sentence,
}


def check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise CUDA's RuntimeError for an attention's tensors on two devices.

    CUDA's kernel that takes a mask is the memory-efficient one, for tensors of four
    dimensions. Other kernels compute with torch's operations, which raise the error.
    """
    device = query.device
    if key.device != device or value.device != device:
        raise RuntimeError(
            f"Expected query, key, and value to have the same device type, but got "
            f"query.device: {device} key.device: {key.device} and value.device: "
            f"{value.device} instead."
        )
    if mask is not None and mask.device != device and not query.is_cpu and query.dim() == 4:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but got attn_bias is on "
            f"{mask.device}, different from other tensors on {device} (when checking argument "
            f"in method wrapper_{names.shown_type().upper()}__"
            f"_scaled_dot_product_efficient_attention)"
        )


def convolution_type_error(images: str, name: str, other: str) -> RuntimeError:
    """CUDA's error for a convolution whose images and weights differ in type.

    `images` and `other` are types such as "torch.vgpu.FloatTensor".
    """
    return RuntimeError(_type_sentence(images, name, other))


def _type_sentence(images: str, name: str, other: str) -> str:
    text = f"Input type ({images}) and {name} type ({other}) should be the same"
    if images.count(".") == 1:
        # The images are on the CPU, whose kernel also takes MKLDNN's tensors.
        text += f" or input should be a MKLDNN tensor and {name} is a dense tensor"
    return text


def on_vgpu(payload: Tensor) -> str:
    """The type that the virtual tensor of a payload has."""
    return f"torch.{names.shown_type()}.{payload.type().rpartition('.')[2]}"


def check_host_tensors(
    info: OpInfo,
    func: torch._ops.OpOverload,
    args: tuple,
    kwargs: dict,
    host_tensors: list[Tensor],
    device: torch.device,
) -> None:
    """Raise RuntimeError for a tensor of the host that CUDA does not accept.

    CUDA accepts a host tensor that is a number to read, indices, or lengths. `device` is the
    device of the other tensors.
    """
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and _is_in(value, host_tensors):
            raise device_mismatch_error(info, func, args, device, value.device)
    for name in info.out_names:
        out = kwargs.get(name)
        if _is_in(out, host_tensors):
            raise device_mismatch_error(info, func, args, device, out.device)
    if func.overloadpacket in INDEXING:
        if not isinstance(args[0], VirtualTensor):
            raise RuntimeError(_index_sentence(args))
        values = args[2] if len(args) > 2 else None
        if _is_in(values, host_tensors) and values.dim() > 0:
            raise device_mismatch_error(info, func, args, device, values.device)
    elif not info.takes_host_tensors:
        for host in host_tensors:
            if host.dim() > 0 or not info.takes_host_numbers:
                raise device_mismatch_error(info, func, args, device, host.device)


def _is_in(value: object, tensors: list[Tensor]) -> bool:
    """Whether the object itself is in the list; `in` would compare the tensors' elements."""
    return any(value is tensor for tensor in tensors)


def check_generator(generator: torch.Generator, device: torch.device) -> None:
    """Raise torch's RuntimeError if the generator does not belong to the device."""
    actual = device_of(generator)
    if actual.type != device.type:
        raise RuntimeError(
            f"Expected a '{device.type}' device type for generator but found '{actual.type}'"
        )
    if actual != device:
        raise RuntimeError(f"Expected a '{device}' generator device but found '{actual}'")


def check_foreach_devices(info: OpInfo, func: torch._ops.OpOverload, args: tuple) -> None:
    """Raise RuntimeError if tensors at the same index in the lists are on two devices."""
    first, *others = (value for value in args if isinstance(value, (list, tuple)))
    for value in others:
        if len(value) == len(first):
            for tensor, other in zip(first, value, strict=True):
                if not isinstance(other, Tensor) or other.device == tensor.device:
                    continue
                if not other.is_cpu or other.dim() > 0:
                    raise device_mismatch_error(info, func, args, tensor.device, other.device)


def host_out_of_memory_error(info: OpInfo, device: torch.device) -> torch.OutOfMemoryError:
    """The error for a kernel whose memory the host cannot allocate."""
    return torch.OutOfMemoryError(
        f"{names.runtime()} out of memory. The host keeps the numbers of {device}, and "
        f"{info.name} needs more memory than the host has. Use smaller tensors, or "
        f"{names.option('compute=False', '--shapes-only', 'shapes_only=True')}."
    )


def stopped_error(tensor: VirtualTensor) -> RuntimeError:
    """The error for a tensor of a stopped machine, or of a machine of the parent process.

    Also for a tensor of a device whose kernel has asserted.
    """
    if tensor._block.meter.asserted:
        return tensor._block.meter.assert_error()
    if tensor._block.meter.machine.process != os.getpid():
        return forked_error()
    return RuntimeError(
        f"This tensor was on {tensor.device}, and the virtual GPUs have been stopped since "
        f"then. Its values are lost: create it again after they have started."
    )


def unsupported_error(info: OpInfo, why: object) -> NotImplementedError:
    """The error for an operation that has no kernel on the CPU; `why` is the cause."""
    return NotImplementedError(
        f"Virtual GPUs cannot run the operation aten::{info.name}: {str(why).splitlines()[0]}"
    )
