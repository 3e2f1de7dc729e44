"""torch.cuda.caching_allocator_alloc: bytes of a virtual GPU's memory without a tensor.

Other frameworks would compute in them, by their address. A virtual GPU's bytes have no address
in its own memory: the number that alloc returns is good for caching_allocator_delete alone.
"""

from collections.abc import Callable

import torch

from multigpu.errors import UserError
from multigpu.virtual.patches.replacing import Replacement, Row, Setting
from multigpu.virtual.sim import machine, names

# What is allocated, by the number that alloc returned.
_allocated: dict[int, torch.Tensor] = {}


def _alloc(size: int, stream: int) -> int:
    """Allocate `size` bytes on the current device. Raises OutOfMemoryError as for a tensor."""
    device = torch._C.device(names.INNER, machine.current_index())
    held = torch.empty(size, dtype=torch.uint8, device=device)
    _allocated[id(held)] = held
    return id(held)


def _delete(address: int) -> None:
    if address not in _allocated:
        raise UserError(
            f"caching_allocator_delete({address}): caching_allocator_alloc has not returned "
            f"this number, or it is deleted already."
        )
    del _allocated[address]


def _forget_at_the_end() -> Callable[[], None]:
    return _allocated.clear


ROWS: tuple[Row, ...] = (
    Setting(
        "what caching_allocator_alloc holds",
        _forget_at_the_end,
        "it is on virtual GPUs, which stop",
    ),
    *(
        Replacement(
            "torch._C",
            name,
            lambda original, new=new: new,
            "it is CUDA's allocator; a CPU build has none",
            optional=True,
        )
        for name, new in (
            ("_cuda_cudaCachingAllocator_raw_alloc", _alloc),
            ("_cuda_cudaCachingAllocator_raw_delete", _delete),
        )
    ),
)
