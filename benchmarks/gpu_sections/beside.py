"""Section: virtual GPUs in a process that has used the real GPU.

The other sections run virtual GPUs in processes without CUDA. A learner with one GPU gets two
virtual ones from `multigpu.gpus(2)`, in one process with CUDA.
"""

import torch
from section import Section, main
from workloads import TINY, compute_exactly, new_batch, new_model, training_step

import multigpu
from multigpu import vgpu

STEPS = 3
LIMIT = 1e-5


def losses(device: torch.device, name: str) -> list[float]:
    model = new_model(name, TINY).to(device)
    step = training_step(model, new_batch(name, TINY, 2, device))
    return [step().item() for _ in range(STEPS)]


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def real(section: Section) -> None:
    compute_exactly()
    more = torch.cuda.device_count() + 1
    before = losses(section.device, "cnn")
    with section.item("virtual GPUs start"):
        found = multigpu.gpus(more)
        section.row(
            case=f"multigpu.gpus({more})",
            ok=[device.type for device in found] == ["vgpu"] * more,
            devices=[str(device) for device in found],
        )
    try:
        for name in ("cnn", "gpt"):
            with section.item(f"{name} on both"):
                difference = apart(losses(section.device, name), losses(found[-1], name))
                held = difference <= LIMIT
                section.row(case=f"{name} on both", ok=held, difference=difference)
        with section.item("a copy between them"):
            x = torch.arange(4.0, device=section.device)
            there = x.to(found[0])
            section.row(case="a copy between them", ok=there.tolist() == x.tolist())
    finally:
        vgpu.stop()
    with section.item("the real GPU after vgpu.stop()"):
        difference = apart(losses(section.device, "cnn"), before)
        section.row(
            case="the real GPU after vgpu.stop()",
            ok=difference <= LIMIT,
            difference=difference,
        )


if __name__ == "__main__":
    main(real)
