"""Comparing what a student's function returned with what is expected, in words."""

import math
from numbers import Real
from typing import Any

import torch

MAX_TEXT = 160


def shown(value: Any) -> str:
    """The value in at most MAX_TEXT characters; a large tensor by its first values."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 8:
            first = ", ".join(f"{number:.4g}" for number in value.flatten()[:4].tolist())
            return f"a tensor of shape {tuple(value.shape)} that begins with {first}"
        value = _rounded(value.tolist())
    elif isinstance(value, float):
        value = _rounded(value)
    text = repr(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def difference(got: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> str:
    """What is wrong with `got`, as the end of a sentence; "" if nothing is.

    Numbers, and elements of tensors, may differ by atol + rtol × |expected|, in floating point
    also by rtol / 10 × the largest. A number and a tensor of shape () are alike, as are a list
    and a tuple; a tensor's dtype does not matter, its shape does. NaN equals NaN.
    """
    if isinstance(expected, torch.Tensor) or isinstance(got, torch.Tensor):
        return _tensor_difference(got, expected, rtol, atol)
    if isinstance(expected, list | tuple):
        if not isinstance(got, list | tuple):
            return f"expected a list of {len(expected)}, got {shown(got)}"
        if len(got) != len(expected):
            return f"expected {len(expected)} items, got {len(got)}: {shown(got)}"
        for place, pair in enumerate(zip(got, expected, strict=True)):
            if text := difference(*pair, rtol, atol):
                return f"item {place}: {text}"
        return ""
    if isinstance(expected, dict):
        if not isinstance(got, dict):
            return f"expected a dict, got {shown(got)}"
        missing = [key for key in expected if key not in got]
        extra = [key for key in got if key not in expected]
        if missing or extra:
            word = f"no key {missing[0]!r}" if missing else f"a key {extra[0]!r} too much"
            return f"there is {word}; the keys are {shown(list(got))}"
        for key, value in expected.items():
            if text := difference(got[key], value, rtol, atol):
                return f"{key!r}: {text}"
        return ""
    if _is_number(expected):
        if not _is_number(got):
            return f"expected a number, got {shown(got)}"
        same = got == expected or (math.isnan(got) and math.isnan(expected))
        if same or abs(got - expected) <= atol + rtol * abs(expected):
            return ""
    elif type(got) is type(expected) and got == expected:
        return ""
    return f"expected {shown(expected)}, got {shown(got)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _tensor_difference(got: Any, expected: Any, rtol: float, atol: float) -> str:
    try:
        result, wanted = (
            torch.as_tensor(value, dtype=torch.float64) for value in (got, expected)
        )
    except (TypeError, ValueError, RuntimeError):
        return f"expected {shown(expected)}, got {shown(got)}"
    if result.shape != wanted.shape:
        return f"expected the shape {tuple(wanted.shape)}, got {tuple(result.shape)}"
    if torch.is_tensor(expected) and expected.is_floating_point() and expected.numel() > 1:
        # A small element can be the sum of large numbers, with the rounding errors of these.
        atol += rtol / 10 * wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    close = torch.isclose(result, wanted, rtol, atol, equal_nan=True).flatten()
    if bool(close.all()):
        return ""
    wrong = int((~close).nonzero()[0])
    return (
        f"{int((~close).sum())} of {close.numel()} values differ; value {wrong} is "
        f"{result.flatten()[wrong]:.6g}, expected {wanted.flatten()[wrong]:.6g}"
    )
