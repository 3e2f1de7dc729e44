"""Section: virtual GPUs in a process that has used the real GPU.

The other sections run virtual GPUs in processes without CUDA. A learner with one GPU gets two
virtual ones from `multigpu.gpus(2)`, in one process with CUDA. PyTorch has one accelerator in
a process: once virtual GPUs have started, backward() on the real one raises (torch 2.11,
engine.cpp: opt_ready_stream && opt_parent_stream), also after vgpu.stop(). What
`multigpu.gpus` prints says so, and here it is a row without a verdict.
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
    before = {name: losses(section.device, name) for name in ("cnn", "gpt")}
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
                difference = apart(before[name], losses(found[-1], name))
                held = difference <= LIMIT
                section.row(case=f"{name} on both", ok=held, difference=difference)
        with section.item("forward on the real one"), torch.no_grad():
            x = torch.ones(4, device=section.device)
            section.row(case="forward on the real one", ok=(x + x).sum().item() == 8)
        with section.item("a copy between them"):
            x = torch.arange(4.0, device=section.device)
            there = x.to(found[0])
            section.row(case="a copy between them", ok=there.tolist() == x.tolist())
    finally:
        vgpu.stop()
    with section.item("backward on the real GPU after vgpu.stop()"):
        try:
            difference = apart(losses(section.device, "cnn"), before["cnn"])
            found = {"ok": difference <= LIMIT, "difference": difference}
        except RuntimeError as error:
            found = {"ok": None, "error": str(error).split(" INTERNAL")[0]}
        section.row(case="backward on the real GPU after vgpu.stop()", **found)


if __name__ == "__main__":
    main(real)
