"""What is worth knowing about an operation before it runs? Its schema and tags, looked up once and kept."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
# Indices may lie on the host, as on CUDA; the lengths of packed sequences must.
INDEXING = {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten._unsafe_index_put,
}
TAKES_HOST_TENSORS = INDEXING | {aten._pack_padded_sequence_backward}
TAKES_NUMBERS = {
    aten.fill, aten.fill_, aten.masked_fill, aten.masked_fill_, aten.index_fill, aten.index_fill_, aten.full_like,
}  # fmt: skip
# These may change the shape or the storage of a tensor in place, and no tag says so.
RESIZERS = {aten.resize_, aten.resize_as_, aten.set_}
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
HANDLERS: dict[Any, Callable] = {}  # operations with steps of their own (transfer.py)
KERNELS: dict[Any, Callable] = {}  # operations whose kernel is ours (kernels.py)


class Plan:
    """How one operation is run."""

    __slots__ = (
        "careful", "foreach", "func", "handler", "host_tensors", "kernel", "mutable", "name", "numbers", "outs", "pointwise", "random",
        "resizes", "waits", "writes",
    )  # fmt: skip

    def __init__(self, func: torch._ops.OpOverload, view: Callable, decompose: Callable):
        self.func = func  # kept alive: plans are found by its identity
        packet, schema, tags = func.overloadpacket, func._schema, func.tags
        self.name = str(packet).removeprefix("aten.")
        self.kernel = KERNELS.get(packet, func._op)
        self.handler = HANDLERS.get(packet)
        aliases = [value.alias_info for value in schema.returns]
        if self.handler is None and packet not in KERNELS:
            if func.has_kernel_for_dispatch_key(COMPOSITE):
                self.handler = decompose
            elif len(aliases) == 1 and aliases[0] and not aliases[0].is_write:
                self.handler = view
        self.pointwise = torch.Tag.pointwise in tags
        # A foreach operation works on many tensors, each on a device of its own.
        self.foreach = self.name.startswith(("_foreach_", "_fused_", "_amp_foreach"))
        self.host_tensors = packet in TAKES_HOST_TENSORS
        # A tensor of the host without dimensions is taken as a number by these, as on CUDA.
        self.numbers = self.pointwise or packet in TAKES_NUMBERS
        self.random = torch.Tag.nondeterministic_seeded in tags
        # The host has to know the result, or its shape, before it can go on.
        self.waits = (
            torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        )
        self.mutable = schema.is_mutable
        # It may change the shape or the storage of a tensor that is there already.
        reshapes = torch.Tag.inplace_view in tags or packet in RESIZERS
        self.outs = [argument.name for argument in schema.arguments if argument.is_out]
        self.resizes = self.mutable and (reshapes or bool(self.outs))
        self.writes = self.mutable and not reshapes
        self.careful = self.waits or self.random or self.resizes or self.host_tensors

    def written(self, args: list, kwargs: dict) -> set[int]:
        """The identities of the tensors among the arguments of one call that it writes."""
        found: set[int] = set()
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                found.update(map(id, value if isinstance(value, (list, tuple)) else (value,)))
        return found
