"""What dispatch needs to know about an operation, from the operation's schema and tags."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.ops import nondeterministic
from multigpu.virtual.sim import names
from multigpu.virtual.sim.workspace import USERS

aten = torch.ops.aten
KernelFunction = Callable[..., Any]
# Runs an operation instead of dispatch's own steps: handler(func, args, kwargs).
Handler = Callable[[torch._ops.OpOverload, tuple, dict], Any]

# The indices of these operations can be on the host, as on CUDA.
INDEXING = {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten._unsafe_index_put,
}
# The lengths of packed sequences must be on the host.
TAKES_HOST_TENSORS = INDEXING | {aten._pack_padded_sequence_backward}
# CUDA's kernels compute grad · output first (aten/src/ATen/native/cuda/SoftMax.cu).
TEMPORARIES = (aten._softmax_backward_data,)
# These accept a host tensor without dimensions as a number, as all pointwise operations do.
TAKES_HOST_NUMBERS = {
    aten.fill,
    aten.fill_,
    aten.masked_fill,
    aten.masked_fill_,
    aten.index_fill,
    aten.index_fill_,
    aten.full_like,
}
# These can change the shape or the storage of a tensor in place, but have no tag for that.
RESIZERS = {aten.resize_, aten.resize_as_, aten.set_}
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
CPU = torch._C.DispatchKey.CPU
PRIVATE = torch._C.DispatchKey.PrivateUse1
CUDA = torch._C.DispatchKey.CUDA
# The keys of a custom operation's kernel for virtual GPUs: for this device type, or for all.
CUSTOM_KERNELS = (PRIVATE, torch._C.DispatchKey.CompositeExplicitAutograd)

# Two registries, by the operation's packet. The package's __init__ fills them from kernels.py
# and transfer.py, which import this module. Nothing changes them after that.
HANDLERS: dict[torch._ops.OpOverloadPacket, Handler] = {}
KERNELS: dict[torch._ops.OpOverloadPacket, KernelFunction] = {}


class OpInfo:
    """How one operation is executed.

    name                the operation's name without "aten."
    kernel              the function that computes it on payloads
    handler             the function that executes it instead of dispatch's own steps, or None
    pointwise           torch tags it as elementwise
    foreach             it works on lists of tensors, position by position
    takes_host_tensors  it accepts tensors of the host among its arguments
    takes_host_numbers  it accepts tensors of the host that have no dimensions
    random              it draws random numbers
    host_waits          the host waits for the result, or for the result's shape
    mutable             it writes one of its arguments
    out_names           the names of its output arguments (`out=`)
    resizes             it may change the shape or the storage of an argument
    writes              it writes an argument's elements
    empty               it allocates memory without writing it
    temporary           on CUDA the kernel needs a tensor of its first argument's size
    special             the slow path: host_waits, random, resizes, takes_host_tensors or
                        temporary holds
    uses_cublas         it is a matrix product; see sim/workspace.py
    repeats             on shapes alone, the same arguments give the same results: repeats.py
    """

    __slots__ = (
        "empty",
        "foreach",
        "func",
        "handler",
        "host_waits",
        "kernel",
        "mutable",
        "name",
        "out_names",
        "pointwise",
        "random",
        "repeats",
        "resizes",
        "special",
        "takes_host_numbers",
        "takes_host_tensors",
        "temporary",
        "uses_cublas",
        "writes",
    )

    def __init__(self, func: torch._ops.OpOverload, view: Handler, decompose: Handler):
        """`view` and `decompose` are the handlers of views and of composite operations."""
        packet = func.overloadpacket
        schema = func._schema
        tags = func.tags
        # Kept alive, because the cache finds an OpInfo by the id of its operation.
        self.func = func
        self.name = str(packet).removeprefix("aten.")
        self.kernel = KERNELS.get(packet, func._op)
        alerts = packet in nondeterministic.NAMES
        if alerts:
            self.kernel = nondeterministic.alerting(func, self.kernel)
        self.handler = HANDLERS.get(packet)
        aliases = [value.alias_info for value in schema.returns]
        if self.handler is None and packet not in KERNELS:
            if _has_custom_kernel(func):
                self.handler = run_custom
            elif _has_python_kernel_of_cuda(func):
                self.handler = run_custom_of_cuda
            elif _is_composite(func):
                self.handler = decompose
            elif len(aliases) == 1 and aliases[0] and not aliases[0].is_write:
                self.handler = view
        self.pointwise = torch.Tag.pointwise in tags
        # _fused_adam_ works on lists, but _fused_rms_norm does not.
        on_lists = self.name.startswith(("_foreach_", "_fused_", "_amp_foreach"))
        self.foreach = on_lists and isinstance(schema.arguments[0].type, torch.ListType)
        self.takes_host_tensors = packet in TAKES_HOST_TENSORS
        self.takes_host_numbers = self.pointwise or packet in TAKES_HOST_NUMBERS
        seeded = torch.Tag.nondeterministic_seeded in tags
        # The kernels of this package draw no random numbers.
        self.random = seeded and packet not in KERNELS
        self.host_waits = (
            torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        )
        self.mutable = schema.is_mutable
        reshapes = torch.Tag.inplace_view in tags or packet in RESIZERS
        self.out_names = [argument.name for argument in schema.arguments if argument.is_out]
        self.resizes = self.mutable and (reshapes or bool(self.out_names))
        self.writes = self.mutable and not reshapes
        self.empty = self.name.startswith(("empty", "new_empty"))
        self.temporary = packet in TEMPORARIES
        self.special = (
            self.host_waits
            or self.random
            or self.resizes
            or self.takes_host_tensors
            or self.temporary
        )
        self.uses_cublas = packet in USERS
        # A kernel of another namespace can be a program's own, and do anything.
        self.repeats = func.namespace == "aten" and not (
            self.host_waits or self.random or reshapes or self.foreach or alerts
        )

    def written_ids(self, args: list, kwargs: dict) -> set[int]:
        """The ids of the argument tensors that a call with these arguments writes."""
        ids: set[int] = set()
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                is_positional = position < len(args)
                value = args[position] if is_positional else kwargs.get(argument.name)
                values = value if isinstance(value, (list, tuple)) else (value,)
                ids.update(map(id, values))
        return ids


def _has_custom_kernel(func: torch._ops.OpOverload) -> bool:
    """Whether the operation is a program's own, with a kernel for virtual GPUs.

    A collective of gloo ("c10d") moves the payloads, as it moves the numbers of a GPU.
    """
    if func.namespace in ("aten", "c10d"):
        return False
    return any(func.has_kernel_for_dispatch_key(key) for key in CUSTOM_KERNELS)


def run_custom(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Handler of a custom operation (torch.library): its kernel gets the virtual tensors.

    The operations that the kernel calls are then executed and timed as usual.
    """
    return func.redispatch(torch._C.DispatchKeySet(PRIVATE), *args, **kwargs)


# Kernels for CUDA that call dispatch, as torch.library names them: "aten/empty_strided/CUDA".
DISPATCHING_KERNELS: set[str] = set()


def _has_python_kernel_of_cuda(func: torch._ops.OpOverload) -> bool:
    """Whether programs see CUDA, and this program has given the operation a kernel for it.

    A kernel in C++ does not count: it would look for a real GPU's memory.
    """
    name = func._schema.name.partition("::")[2]
    if overload := func._schema.overload_name:
        name = f"{name}.{overload}"
    key = f"{func.namespace}/{name}/CUDA"
    return (
        names.shown_type() == "cuda"
        and key in torch.library._impls
        and key not in DISPATCHING_KERNELS
    )


def run_custom_of_cuda(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """The same as run_custom, for a kernel that is registered for CUDA."""
    return func.redispatch(torch._C.DispatchKeySet(CUDA), *args, **kwargs)


def _is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether CUDA has no kernel for the operation, because torch composes it of others.

    Of torch's own operations, those that have a kernel for the CPU have one for CUDA, too.
    """
    if func.namespace == "aten" and func.has_kernel_for_dispatch_key(CPU):
        return False
    return func.has_kernel_for_dispatch_key(COMPOSITE)
