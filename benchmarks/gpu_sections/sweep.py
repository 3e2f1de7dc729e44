"""Section: kernels of many shapes, measured and simulated: where the cost model is wrong."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from section import Section
from timing import Call, Case, compare, kernel_times, simulated_kernels
from workloads import HALF, precisions

# m, n, k: squares, thin products as of a small batch, a GPT's layers, an odd vocabulary.
PRODUCTS = (
    *((n, n, n) for n in (128, 256, 512, 1024, 2048, 4096, 8192)),
    *((m, 4096, 4096) for m in (1, 16, 64, 256)),
    *((8192, 1536, 512), (8192, 512, 2048), (8192, 32_000, 512), (8192, 50_257, 768)),
    *((4095, 4095, 4095), (1000, 1000, 1000), (256, 256, 65_536)),
)
# Channels in and out, kernel, stride, height and width: layers of ResNet-50 and of the CNN.
CONVOLUTIONS = (
    *((3, 64, 7, 2, 224), (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (256, 128, 1, 2, 56)),
    *((128, 128, 3, 1, 28), (256, 1024, 1, 1, 14), (256, 256, 3, 1, 14)),
    *((512, 512, 3, 1, 7), (1, 16, 3, 1, 28)),
)
# Rows, heads, length, width of a head.
ATTENTION = ((8, 12, 1024, 64), (4, 16, 2048, 64), (2, 32, 4096, 128), (64, 8, 512, 64))
MEMORY_BOUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + x,
    "copy": torch.clone,
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, (1024,)),
    "softmax": lambda x: F.softmax(x, 1),
    "batch_norm": lambda x: F.batch_norm(x.view(-1, 64, 4, 4), None, None, training=True),
    "sum": torch.sum,
}


def shapes(section: Section) -> Iterator[tuple[str, str, tuple]]:
    """(kind, precision, sizes) of all cases."""
    wanted = precisions(section.gpu)
    products, convolutions, attention, megabytes = PRODUCTS, CONVOLUTIONS, ATTENTION, (1, 256)
    if section.quick:
        products, convolutions, attention = [(16, 16, 16)], [(3, 4, 3, 1, 8)], [(1, 2, 16, 8)]
        megabytes = (1 / 16,)
    for how in wanted:
        yield from (("product", how, one) for one in products)
        for rows in (2,) if section.quick else (8, 128):
            yield from (("convolution", how, (rows, *one)) for one in convolutions)
    for one, causal in product(attention, (0, 1)):
        yield "attention", wanted[-1], (*one, causal)
    yield from (("memory", "fp32", one) for one in product(MEMORY_BOUND, megabytes))


def calls(kind: str, how: str, sizes: tuple, device: torch.device) -> dict[str, Call]:
    """The forward call of a case, and the backward call if it has one."""

    def random(*shape: int) -> torch.Tensor:
        # Zeros would take less power, so a GPU at its power limit would be faster with them.
        dtype = HALF.get(how, torch.float32)
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

    if kind == "memory":
        name, megabytes = sizes
        x = random(int(megabytes * 256), 1024).detach()
        return {"forward": lambda: MEMORY_BOUND[name](x)}
    if kind == "product":
        m, n, k = sizes
        inputs, operation = [random(m, k), random(k, n)], torch.matmul
    elif kind == "convolution":
        rows, inward, outward, size, stride, image = sizes
        inputs = [random(rows, inward, image, image), random(outward, inward, size, size)]
        operation = partial(F.conv2d, stride=stride, padding=size // 2)
    else:
        *shape, causal = sizes
        inputs = [random(*shape) for _ in range(3)]
        operation = partial(F.scaled_dot_product_attention, is_causal=bool(causal))
    out = operation(*inputs)
    grad = torch.randn_like(out)
    return {
        "forward": torch.no_grad()(lambda: operation(*inputs)),
        "backward": lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
    }


def cases(section: Section) -> Iterator[Case]:
    for kind, how, sizes in shapes(section):
        name = f"{kind} {how} {'×'.join(map(str, sizes))}"
        yield Case(name, kind, how, partial(calls, kind, how, sizes))


if __name__ == "__main__":
    compare(
        "One call of each kernel: its time on the GPU, without the host's, and the simulated "
        "time. Operands are random, and warm in the L2 cache. cuDNN's heuristics choose the "
        "algorithm of a convolution. Sizes: product m×n×k; convolution rows×channels "
        "in×out×kernel×stride×image; attention rows×heads×length×width×causal; memory MiB.",
        "µs",
        cases,
        kernel_times,
        simulated_kernels,
    )
