"""Section: what PyTorch allocates beside tensors, and how fast copies are.

Workspaces of cuBLAS (allocated at the first product of a thread), the peak of single
operations, the segments that the caching allocator reserves, and copies between host and GPU
from pageable and pinned memory. Nothing is compared: virtual GPUs are held against these rows.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from section import Section, main

MIB = 2**20
ROWS, CLASSES = 1024, 50_257
COPIES = 7
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x, labels: F.softmax(x, -1),
    "log_softmax": lambda x, labels: F.log_softmax(x, -1),
    "cross_entropy": F.cross_entropy,
    "gelu": lambda x, labels: F.gelu(x),
    "relu": lambda x, labels: F.relu(x),
    "dropout": lambda x, labels: F.dropout(x, 0.1),
    "layer_norm": lambda x, labels: F.layer_norm(x, x.shape[1:]),
    "float": lambda x, labels: x.float(),
}


def peak(call: Callable[[], object]) -> tuple[int, object]:
    """The bytes by which a call raises the peak, and its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def workspaces(section: Section) -> None:
    free, total = torch.cuda.mem_get_info()
    section.row(case="the process's context", used_mib=(total - free) / MIB)
    a = torch.ones(512, 512, device=section.device, requires_grad=True)
    own = torch.cuda.memory_allocated()
    product = a @ a
    forward = torch.cuda.memory_allocated() - own - product.untyped_storage().nbytes()
    section.row(case="workspace of the first product", bytes=forward)
    product.sum().backward()
    more = torch.cuda.memory_allocated() - own - 2 * product.untyped_storage().nbytes()
    section.row(case="workspace of the first backward", bytes=more - forward)
    section.row(case="reserved then", bytes=torch.cuda.memory_reserved())


def operations(section: Section, dtype: torch.dtype) -> None:
    shape = ROWS, CLASSES
    x = torch.randn(*shape, device=section.device, dtype=dtype, requires_grad=True)
    labels = torch.zeros(ROWS, dtype=torch.long, device=section.device)
    size = x.untyped_storage().nbytes()
    for name, operation in OPERATIONS.items():
        x.grad = None
        forward, result = peak(lambda operation=operation: operation(x, labels))
        gradient = torch.ones_like(result)
        backward, _ = peak(lambda result=result, g=gradient: result.backward(g))
        section.row(
            case=f"{name} of {ROWS}×{CLASSES:,}, {str(dtype).removeprefix('torch.')}",
            forward_of_input=round(forward / size, 3),
            backward_of_input=round(backward / size, 3),
        )
        del result, gradient


def segments(section: Section) -> None:
    torch.cuda.empty_cache()
    kept = []
    for size in (513, MIB, MIB + 1, 10 * MIB, 10 * MIB + 1, 11 * MIB, 33 * MIB):
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        kept.append(torch.empty(size, dtype=torch.uint8, device=section.device))
        section.row(
            case=f"a tensor of {size:,} bytes",
            allocated=torch.cuda.memory_allocated() - allocated,
            reserved=torch.cuda.memory_reserved() - reserved,
        )


def copies(section: Section) -> None:
    for size in (1, 16, 256):
        there = torch.empty(size * MIB, dtype=torch.uint8, device=section.device)
        for pinned in (False, True):
            host = torch.ones(size * MIB, dtype=torch.uint8, pin_memory=pinned)
            for way, target, source in (("to the GPU", there, host), ("back", host, there)):
                times = []
                for _ in range(COPIES):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    target.copy_(source)
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - began)
                memory = "pinned" if pinned else "pageable"
                section.row(
                    case=f"{size} MiB, {memory}, {way}",
                    gb_per_s=round(size * MIB / median(times) / 1e9, 2),
                )


def real(section: Section) -> None:
    if section.device.type != "cuda":
        section.skip("the allocator", "it is the GPU's")
        return
    for part in (workspaces, segments, copies):
        with section.item(part.__name__):
            part(section)
    for dtype in (torch.float32, torch.bfloat16):
        with section.item(f"operations, {dtype}"):
            operations(section, dtype)


if __name__ == "__main__":
    main(real)
