"""Section: what PyTorch allocates beside tensors, and how fast copies are.

Nothing is compared here: the cost model's constants and tests/virtual/test_reserved.py are
held against these rows.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from section import Section, main

MIB = 2**20
ROWS, CLASSES = 1024, 50_257
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x, labels: F.softmax(x, -1),
    "log_softmax": lambda x, labels: F.log_softmax(x, -1),
    "cross_entropy": F.cross_entropy,
    "dropout": lambda x, labels: F.dropout(x, 0.1),
}


def workspaces(section: Section) -> None:
    free, total = torch.cuda.mem_get_info()
    section.row(case="the process's context", used_mib=(total - free) / MIB)
    a = torch.ones(512, 512, device=section.device, requires_grad=True)
    own = torch.cuda.memory_allocated()
    product = a @ a
    forward = torch.cuda.memory_allocated() - own - product.nbytes
    section.row(case="workspace of the first product", bytes=forward)
    product.sum().backward()
    more = torch.cuda.memory_allocated() - own - 2 * product.nbytes
    section.row(case="workspace of the first backward", bytes=more - forward)
    section.row(case="reserved then", bytes=torch.cuda.memory_reserved())


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
        for memory in ("pageable", "pinned"):
            host = torch.ones(size * MIB, dtype=torch.uint8, pin_memory=memory == "pinned")
            for way, target, source in (("to the GPU", there, host), ("back", host, there)):
                times = []
                for _ in range(7):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    target.copy_(source)
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - began)
                rate = size * MIB / median(times) / 1e9
                section.row(case=f"{size} MiB, {memory}, {way}", gb_per_s=rate)


def peak(call: Callable[[], object]) -> tuple[int, object]:
    """The bytes by which a call raises the peak, and its result."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    return torch.cuda.max_memory_allocated() - before, result


def operations(section: Section) -> None:
    labels = torch.zeros(ROWS, dtype=torch.long, device=section.device)
    for dtype in (torch.float32, torch.bfloat16):
        for name, operation in OPERATIONS.items():
            x = torch.ones(ROWS, CLASSES, device=section.device, dtype=dtype)
            x.requires_grad_()
            forward, result = peak(lambda f=operation, x=x: f(x, labels))
            gradient = torch.ones_like(result)
            backward, _ = peak(lambda result=result, g=gradient: result.backward(g))
            section.row(
                case=f"{name} of {ROWS}×{CLASSES:,}, {str(dtype).removeprefix('torch.')}",
                forward_of_input=forward / x.nbytes,
                backward_of_input=backward / x.nbytes,
            )


def real(section: Section) -> None:
    if section.device.type != "cuda":
        section.skip("the allocator", "it is the GPU's")
        return
    for part in (workspaces, segments, copies, operations):
        with section.item(part.__name__):
            part(section)


if __name__ == "__main__":
    main(
        "What the GPU's allocator does, and the rate of copies: measured, and not compared. "
        "Peaks of an operation are in sizes of its input.",
        {
            "used_mib": "MiB on the GPU",
            "bytes": "",
            "allocated": "bytes",
            "reserved": "bytes",
            "gb_per_s": "GB/s",
            "forward_of_input": "× input",
            "backward_of_input": "× input",
        },
        real,
    )
