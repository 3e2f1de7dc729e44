"""Section: automatic mixed precision in fp16 and bf16.

1. The dtype in which autocast computes each operation, on the real and on the virtual GPU.
2. Training with autocast, and in fp16 with GradScaler, against float32: the losses stay close.
3. A gradient that overflows: GradScaler skips the step and halves its scale.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from precision import HALF
from section import Section, main
from torch import nn
from workloads import TINY, Size, compute_exactly, loss_of, new_batch, new_model

from multigpu.virtual import control

STEPS = 20
REHEARSED = 2  # steps
LIMIT = 0.05  # of the loss: bfloat16 has 8 bits
SMALL = Size(image=64, layers=2, width=128, heads=4, length=64, words=1000)


def operations(
    device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], torch.Tensor]]:
    """Operations of autocast's three kinds: 16 bit, float32, and the widest dtype.

    `dtype` is autocast's: the results of earlier operations have it.
    """
    x = torch.rand(4, 8, device=device) + 0.5
    half = x.to(dtype)
    images = torch.rand(2, 3, 8, 8, device=device)
    weight = torch.rand(4, 3, 3, 3, device=device)
    labels = torch.zeros(4, dtype=torch.long, device=device)
    q = torch.rand(1, 2, 4, 8, device=device)
    return {
        "matmul": lambda: x @ x.T,
        "linear": lambda: F.linear(x, x),
        "conv2d": lambda: F.conv2d(images, weight),
        "bmm": lambda: torch.bmm(q[0], q[0].mT),
        "attention": lambda: F.scaled_dot_product_attention(q, q, q),
        "softmax": lambda: F.softmax(half, 1),
        "log_softmax": lambda: F.log_softmax(half, 1),
        "layer_norm": lambda: F.layer_norm(half, (8,)),
        "cross_entropy": lambda: F.cross_entropy(half, labels),
        "mse_loss": lambda: F.mse_loss(half, half),
        "exp": lambda: half.exp(),
        "pow": lambda: half.pow(2),
        "sum": lambda: half.sum(),
        "cumsum": lambda: half.cumsum(1),
        "norm": lambda: half.norm(),
        "add": lambda: half + x,
        "cat": lambda: torch.cat([half, x]),
        "relu": lambda: F.relu(half),
        "gelu": lambda: F.gelu(half),
        "addcmul": lambda: torch.addcmul(half, half, x),
    }


def dtypes(device: torch.device, half: torch.dtype) -> dict[str, str]:
    """Each operation's dtype under autocast, or its error."""
    found = {}
    for name, call in operations(device, half).items():
        try:
            with torch.autocast(device.type, half):
                found[name] = str(call().dtype).removeprefix("torch.")
        except RuntimeError as error:
            found[name] = str(error).split("\n")[0]
    return found


def losses(
    name: str, half: torch.dtype | None, section: Section
) -> tuple[list[float], float | None]:
    """The losses of STEPS steps; and the scale of the GradScaler at the end, in fp16."""
    compute_exactly()
    device = section.device
    size, rows = (TINY, 2) if section.quick else (SMALL, 16)
    model = new_model(name, size).to(device)
    batch = new_batch(name, size, rows, device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
    found = []
    for _ in range(REHEARSED if section.quick else STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, half or torch.bfloat16, enabled=half is not None):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    return torch.stack(found).tolist(), scaler.get_scale() if scaler.is_enabled() else None


def overflow(device: torch.device) -> dict[str, object]:
    """A step with an infinite gradient, and the next one, under GradScaler."""
    layer = nn.Linear(4, 4).to(device)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16)
    x = torch.ones(2, 4, device=device)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(layer(x).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor != 1.0:
            skipped = torch.equal(before, layer.weight)
    moved = not torch.equal(before, layer.weight)
    return {"ok": skipped and moved and scaler.get_scale() == 2.0**15}


def real(section: Section) -> None:
    simulated = section.virtual()
    for precision, half in HALF.items():
        if precision == "bf16" and not section.card.gpu.bf16:
            section.skip("bf16", f"{section.card.name} has no bf16 units")
            continue
        with section.item(f"dtypes under autocast in {precision}"):
            expected = simulated.get(precision, {}).get("dtypes", {})
            for name, dtype in dtypes(section.device, half).items():
                same = dtype == expected.get(name)
                # The CPU has lists of its own, which a rehearsal does not compare.
                section.row(
                    case=f"{precision} {name}",
                    ok=same if section.device.type == "cuda" else None,
                    dtype=dtype,
                    virtual_dtype=expected.get(name),
                )
        for name in ("cnn", "gpt"):
            with section.item(f"{name} in {precision}"):
                exact, _ = losses(name, None, section)
                found, scale = losses(name, half, section)
                pairs = zip(exact, found, strict=True)
                difference = max(abs(a - b) / abs(a) for a, b in pairs)
                section.row(
                    case=f"{precision} training, {name}",
                    ok=difference <= LIMIT,
                    loss_difference=difference,
                    limit=LIMIT,
                    scale=scale,
                )
    with section.item("an overflow under GradScaler"):
        section.row(case="GradScaler skips an overflow", **overflow(section.device))


def virtual(section: Section) -> None:
    with control.running(1, gpu=section.card.gpu) as (device,):
        for precision, half in HALF.items():
            section.row(case=precision, dtypes=dtypes(device, half))


if __name__ == "__main__":
    main(real, virtual)
