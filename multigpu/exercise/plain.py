"""Plain data, the only thing that a student's process and the checks exchange.

None, bool, int, float, str, list, tuple, dict and tensors; NumPy's arrays become tensors.
Never a pickle, because unpickling runs code.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
MAX_DEPTH = 20
# A tensor without elements has no bytes to bound it, and its shape alone can fill the memory:
# as a list, one of shape (2**24, 0) has 2**24 lists.
MAX_EMPTY = 1 << 16


class NotPlain(ValueError):
    """A value that cannot cross the border, or bytes that are no plain data."""


def encode(value: Any) -> tuple[bytes, bytes]:
    """Return (header, body): JSON, and the tensors' bytes. Raises NotPlain."""
    buffers: list[bytes] = []
    position = 0

    def pack(value: Any, depth: int) -> Any:
        nonlocal position
        if depth > MAX_DEPTH:
            raise NotPlain(f"nested more than {MAX_DEPTH} deep")
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return {"list": [pack(item, depth + 1) for item in value]}
        if isinstance(value, tuple):
            return {"tuple": [pack(item, depth + 1) for item in value]}
        if isinstance(value, dict):  # also an OrderedDict, such as a state dict
            pairs = [[pack(k, depth + 1), pack(v, depth + 1)] for k, v in value.items()]
            return {"dict": pairs}
        if isinstance(value, np.ndarray):
            try:
                # ascontiguousarray would make the shape () to (1,).
                native = value.dtype.newbyteorder("=")
                value = torch.from_numpy(np.array(value, native, order="C"))
            except TypeError:
                raise NotPlain(f"an array of {value.dtype} is not plain data") from None
        if isinstance(value, np.generic):
            return pack(value.item(), depth + 1)
        if isinstance(value, torch.Tensor):
            name = str(value.dtype).removeprefix("torch.")
            if name not in DTYPES:
                raise NotPlain(f"a tensor of {name} is not plain data")
            try:
                # contiguous() keeps the stride of a single element, such as column[:1].
                contiguous = torch.contiguous_format
                tensor = value.detach().cpu().clone(memory_format=contiguous).resolve_neg()
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            except RuntimeError as error:
                where = f"a tensor on {value.device} of layout {value.layout}"
                raise NotPlain(f"{where} is not plain data: {error}") from None
            _check_empty(tensor.shape)
            packed = {"tensor": [name, list(tensor.shape), position, len(data)]}
            buffers.append(data)
            position += len(data)
            return packed
        raise NotPlain(
            f"{type(value).__name__} is not plain data: give numbers, texts, lists, dicts or "
            f"tensors"
        )

    packed = pack(value, 0)
    try:
        return json.dumps(packed).encode(), b"".join(buffers)
    except ValueError as error:
        raise NotPlain(f"an integer of so many digits is not plain data: {error}") from None


def decode(header: bytes, body: bytes) -> Any:
    """The value of encode(). Raises NotPlain for anything that encode cannot have written."""
    position = 0

    def unpack(packed: Any, depth: int) -> Any:
        nonlocal position
        if depth > MAX_DEPTH:
            raise NotPlain(f"nested more than {MAX_DEPTH} deep")
        if packed is None or type(packed) in (bool, int, float, str):
            return packed
        if type(packed) is not dict or len(packed) != 1:
            raise NotPlain("not written by encode()")
        [(kind, content)] = packed.items()
        if type(content) is not list:
            raise NotPlain("not written by encode()")
        if kind == "list":
            return [unpack(item, depth + 1) for item in content]
        if kind == "tuple":
            return tuple(unpack(item, depth + 1) for item in content)
        if kind == "dict":
            return {unpack(k, depth + 1): unpack(v, depth + 1) for k, v in content}
        if kind == "tensor":
            tensor, position = _tensor(content, body, position)
            return tensor
        raise NotPlain(f"{kind!r} is not plain data")

    try:
        return unpack(json.loads(header), 0)
    except NotPlain:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise NotPlain(f"not written by encode(): {error}") from None


def _tensor(content: list, body: bytes, position: int) -> tuple[torch.Tensor, int]:
    """The tensor, and where the next one begins.

    Tensors lie one after the other. If they could share bytes, a small frame would fill the
    memory.
    """
    name, shape, start, length = content
    if name not in DTYPES or not all(type(n) is int for n in (start, length, *shape)):
        raise NotPlain("not written by encode()")
    dtype = DTYPES[name]
    inside = start == position and length >= 0 and start + length <= len(body)
    if not inside or min(shape, default=0) < 0 or len(shape) > MAX_DEPTH:
        raise NotPlain("not written by encode()")
    if math.prod(shape) * dtype.itemsize != length:
        raise NotPlain("a tensor's bytes do not have its shape")
    if not length:
        _check_empty(shape)
        return torch.empty(shape, dtype=dtype), position
    raw = torch.frombuffer(bytearray(body[start : start + length]), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape), start + length


def _check_empty(shape: Sequence[int]) -> None:
    """Raise NotPlain for a tensor without elements whose other dimensions are large."""
    if 0 in shape and math.prod(max(1, size) for size in shape) > MAX_EMPTY:
        raise NotPlain(f"a tensor of shape {tuple(shape)} is not plain data: it is too large")
