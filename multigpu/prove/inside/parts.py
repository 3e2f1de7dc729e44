"""Which elements of which parameter a rank holds, whatever shards them.

Plain parameters, DTensors (FSDP2, tensor parallelism), and the flat parameters of FSDP1.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from multigpu.prove.inside.host import numbers
from multigpu.prove.record import Part
from multigpu.prove.sketch import SLAB, SUMS, sketch

# What DDP, DataParallel, torch.compile, FSDP1 and activation checkpointing put into names.
WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
)


@dataclass
class Tracked:
    """A part, and how its elements are taken from the optimizer's tensor: a local tensor on
    the host gives pieces (elements of the flattened whole parameter, their first index).
    """

    part: Part
    parameter: torch.Tensor
    pieces: Callable[[torch.Tensor], Iterable[tuple[torch.Tensor, int]]]

    def sketch(self, tensor: torch.Tensor) -> np.ndarray:
        """The sketch of the part of `tensor`, a parameter or its gradient: float64 (64,)."""
        total = np.zeros(SUMS)
        # A complex number is two.
        times = 2 if tensor.is_complex() else 1
        numel = math.prod(self.part.shape) * times
        for values, start in self.pieces(numbers(tensor)):
            total += sketch(values, numel, start * times)
        return total


def partial_ranks(gradient: torch.Tensor) -> tuple[int, ...] | None:
    """The ranks whose local gradients add up to a DTensor's; None if each has its part."""
    placements = getattr(gradient, "placements", ())
    for dimension, placement in enumerate(placements):
        if placement.is_partial():
            group = gradient.device_mesh.get_group(dimension)
            return tuple(torch.distributed.get_process_group_ranks(group))
    return None


def clean(name: str) -> str:
    """A parameter's name without the names of wrappers."""
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


def track(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> list[Tracked]:
    """The parts of an optimizer's parameters, in its order.

    `modules` are the outermost modules that the program has called: they have the names.
    """
    modules = list(modules)
    names: dict[int, str] = {}
    flat: dict[int, tuple[torch.Tensor, int | None]] = {}
    for module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=True):
            names.setdefault(id(parameter), clean(name))
        for submodule in module.modules():
            for handle in getattr(submodule, "_all_handles", None) or _handles(submodule):
                whole = handle.flat_param
                flat[id(whole)] = (whole, None)
                for place, parameter in enumerate(whole._params or ()):
                    flat[id(parameter)] = (whole, place)
    tracked: list[Tracked] = []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        name = names.get(id(parameter), f"parameter {number}")
        if id(parameter) in flat:
            tracked += _of_flat(parameter, *flat[id(parameter)], names)
        elif hasattr(parameter, "_local_tensor"):
            tracked.append(of_dtensor(parameter, name))
            tracked[-1].part.in_module = id(parameter) in names
        else:
            part = Part(name, tuple(parameter.shape), None, parameter.numel(), _eps(parameter))
            tracked.append(Tracked(part, parameter, lambda t: [(t.reshape(-1), 0)]))
    return tracked


def _handles(module: nn.Module) -> list:
    handle = getattr(module, "_handle", None)
    return [handle] if handle is not None and hasattr(handle, "flat_param") else []


def _eps(tensor: torch.Tensor) -> float:
    inexact = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if inexact else 0.0


def _of_flat(
    parameter: torch.Tensor, whole: torch.Tensor, only: int | None, names: dict[int, str]
) -> Iterator[Tracked]:
    """The parts of FSDP1's flat parameter; `only` the one of this place, if the optimizer has
    the original parameters.
    """
    infos = zip(whole._fqns, whole._shapes, whole._shard_param_infos, strict=True)
    for place, (name, shape, info) in enumerate(infos):
        if only is not None and place != only:
            continue
        held = info.numel_in_shard if info.in_shard else 0
        start = info.intra_param_start_idx if info.in_shard else 0
        # The optimizer's tensor is the flat one, or the piece of one parameter alone.
        first = info.offset_in_shard if info.in_shard and only is None else 0
        full = names.get(id(parameter)) if only is not None else None
        prefix = (names.get(id(whole)) or "").removesuffix("_flat_param")
        shape = tuple(shape)
        shard = None if held == math.prod(shape) else (start or 0, held)
        part = Part(full or clean(prefix + name), shape, shard, held or 0, _eps(parameter))

        def pieces(
            tensor: torch.Tensor, first: int = first, held: int = held, start: int = start
        ) -> list[tuple[torch.Tensor, int]]:
            return [(tensor.reshape(-1)[first : first + held], start)] if held else []

        yield Tracked(part, parameter, pieces)


def placed_otherwise(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a gradient is not divided over the ranks as its parameter is."""
    placements = getattr(gradient, "placements", None)
    return placements is not None and placements != getattr(
        parameter, "placements", placements
    )


def of_dtensor(parameter: torch.Tensor, name: str) -> Tracked:
    """The part of a DTensor, a parameter or a gradient, that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(parameter.shape)
    local = tuple(parameter._local_tensor.shape)
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    shard = None if local == shape else (tuple(offset), local)
    part = Part(name, shape, shard, math.prod(local), _eps(parameter))
    return Tracked(part, parameter, lambda tensor: _blocks(tensor, shape, tuple(offset)))


def _blocks(
    tensor: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, int]]:
    """A block of a tensor of `shape`, as pieces of the flattened tensor."""
    if not tensor.numel():
        return
    if not shape:
        yield tensor.reshape(-1), 0
        return
    row = math.prod(shape[1:])
    if tensor.shape[1:] == shape[1:]:
        yield tensor.reshape(-1), offset[0] * row
        return
    # Zeros around the block: they add nothing to a sketch.
    place = tuple(
        slice(begin, begin + size)
        for begin, size in zip(offset[1:], tensor.shape[1:], strict=True)
    )
    many = max(1, SLAB // row)
    for first in range(0, tensor.shape[0], many):
        rows = tensor[first : first + many]
        whole = rows.new_zeros((rows.shape[0], *shape[1:]))
        whole[(slice(None), *place)] = rows
        yield whole.reshape(-1), (offset[0] + first) * row
