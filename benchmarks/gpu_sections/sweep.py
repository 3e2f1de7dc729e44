"""Section: where the cost model is wrong: kernels of many shapes, measured and simulated.

Matrix products, convolutions, attention and memory-bound operations; the kernels' time on the
device, without the host's. The page lists the worst first.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from precision import HALF, computing, precisions, report_missing, simulating
from section import Section, main
from timing import kernel_times, simulated_kernels

# m, n, k: squares, thin products as of a small batch, a GPT's layers, an odd vocabulary.
PRODUCTS = (
    *((n, n, n) for n in (128, 256, 512, 1024, 2048, 4096, 8192)),
    *((m, 4096, 4096) for m in (1, 16, 64, 256)),
    *((8192, 1536, 512), (8192, 512, 2048), (8192, 32_000, 512), (8192, 50_257, 768)),
    *((4095, 4095, 4095), (1000, 1000, 1000), (256, 256, 65_536)),
)
BATCHED = ((96, 1024, 1024, 64), (256, 128, 128, 64))
# Channels in and out, kernel, stride, height and width: layers of ResNet-50 and of the CNN.
CONVOLUTIONS = (
    (3, 64, 7, 2, 224),
    (64, 64, 1, 1, 56),
    (64, 64, 3, 1, 56),
    (256, 128, 1, 2, 56),
    (128, 128, 3, 1, 28),
    (256, 1024, 1, 1, 14),
    (256, 256, 3, 1, 14),
    (512, 512, 3, 1, 7),
    (1, 16, 3, 1, 28),
)
# Rows, heads, length, width of a head.
ATTENTION = ((8, 12, 1024, 64), (4, 16, 2048, 64), (2, 32, 4096, 128), (64, 8, 512, 64))
MEMORY_BOUND = ("add", "copy", "gelu", "layer_norm", "softmax", "batch_norm", "sum")
MEGABYTES = (1, 16, 256)


def shapes(section: Section) -> Iterator[tuple[str, str, tuple]]:
    """(kind, precision, sizes) of all cases; in a rehearsal, one case of each kind."""
    half = precisions(section)[-1]
    everything = [
        *(("product", how, one) for one, how in product(PRODUCTS, precisions(section))),
        *(("batched product", how, one) for one, how in product(BATCHED, precisions(section))),
        *(
            ("convolution", how, (rows, *one))
            for one, rows, how in product(CONVOLUTIONS, (8, 128), precisions(section))
            if how != "fp32" or rows == 128
        ),
        *(("attention", half, (*one, causal)) for one in ATTENTION for causal in (0, 1)),
        *(("memory", "fp32", one) for one in product(MEMORY_BOUND, MEGABYTES)),
    ]
    if not section.quick:
        yield from everything
        return
    yield ("product", "fp32", (16, 16, 16))
    yield ("product", half, (16, 16, 16))
    yield ("batched product", "fp32", (2, 8, 8, 8))
    yield ("convolution", "fp32", (2, 3, 4, 3, 1, 8))
    yield ("attention", half, (1, 2, 16, 8, 1))
    yield from (("memory", "fp32", (name, 1 / 16)) for name in MEMORY_BOUND)


def calls(
    kind: str, how: str, sizes: tuple, device: torch.device
) -> dict[str, Callable[[], object]]:
    """The forward call of a case, and the backward call if it has one."""
    dtype = HALF.get(how, torch.float32)

    def random(*shape: int, grad: bool = False) -> torch.Tensor:
        # Zeros would take less power, so a GPU at its power limit would be faster with them.
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_(grad)

    if kind == "product":
        m, n, k = sizes
        a, b = random(m, k), random(k, n)
        return {"forward": lambda: a @ b}
    if kind == "batched product":
        rows, m, n, k = sizes
        a, b = random(rows, m, k), random(rows, k, n)
        return {"forward": lambda: a @ b}
    if kind == "convolution":
        rows, inward, outward, size, stride, image = sizes
        images = random(rows, inward, image, image, grad=True)
        weight = random(outward, inward, size, size, grad=True)
        return with_backward(
            lambda: F.conv2d(images, weight, stride=stride, padding=size // 2),
            [images, weight],
        )
    if kind == "attention":
        *shape, causal = sizes
        q, k, v = (random(*shape, grad=True) for _ in range(3))
        return with_backward(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal)), [q, k, v]
        )
    name, megabytes = sizes
    return {"forward": memory_bound(name, int(megabytes * 2**18), device)}


def with_backward(
    forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]
) -> dict[str, Callable[[], object]]:
    """Forward without autograd, and backward alone, of which the graph is kept."""
    out = forward()
    grad = torch.randn_like(out)

    def without_graph() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    def backward() -> tuple:
        return torch.autograd.grad(out, inputs, grad, retain_graph=True)

    return {"forward": without_graph, "backward": backward}


def memory_bound(name: str, numbers: int, device: torch.device) -> Callable[[], object]:
    """An operation on a float32 tensor of `numbers` numbers, in rows of 1,024."""
    x = torch.randn(numbers // 1024, 1024, device=device)
    if name == "batch_norm":
        images = x.view(-1, 64, 4, 4)
        return lambda: F.batch_norm(images, None, None, training=True)
    return {
        "add": lambda: x + x,
        "copy": lambda: x.clone(),
        "gelu": lambda: F.gelu(x),
        "layer_norm": lambda: F.layer_norm(x, (1024,)),
        "softmax": lambda: F.softmax(x, 1),
        "sum": lambda: x.sum(),
    }[name]


def label(kind: str, how: str, sizes: tuple) -> str:
    return f"{kind} {how} {'×'.join(map(str, sizes))}"


def real(section: Section) -> None:
    simulated = section.virtual()
    report_missing(section)
    section.note(
        "Operands are random, and warm in the L2 cache. Convolutions have channels first, and "
        "cuDNN's heuristics choose their algorithm."
    )
    for kind, how, sizes in shapes(section):
        case = label(kind, how, sizes)
        with section.item(case), computing(how):
            for part, call in calls(kind, how, sizes, section.device).items():
                times = kernel_times(call, section.device, 0.1)
                found = simulated.get(f"{case} {part}", {}).get("seconds")
                section.row(
                    case=f"{case} {part}",
                    kind=kind,
                    precision=how,
                    measured=times.as_dict(),
                    simulated=found,
                    error=found and found / times.median - 1,
                )
        if section.device.type == "cuda":
            torch.cuda.empty_cache()


def virtual(section: Section) -> None:
    for kind, how, sizes in shapes(section):
        case = label(kind, how, sizes)
        with section.item(case), simulating(how, section) as device, computing(how):
            for part, call in calls(kind, how, sizes, device).items():
                section.row(case=f"{case} {part}", seconds=simulated_kernels(call))


if __name__ == "__main__":
    main(real, virtual)
