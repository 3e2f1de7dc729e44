"""Section: peak memory of training steps, on the real GPU and on the virtual one.

`allocated` is what tensors hold, which the virtual GPU counts, too. `reserved` is what
PyTorch's caching allocator has taken from the driver. `before` is what cuBLAS's workspaces
hold before the model: the virtual GPU does not simulate them, so its error is that of
`allocated` less `before`. cuDNN's workspaces are freed after each convolution; they count.
"""

import gc

import torch
from precision import computing, precisions, simulating
from section import Section, main
from workloads import FULL, MODELS, TINY, new_batch, new_model, training_step

BATCHES = {"cnn": (1024, 16_384), "resnet50": (8, 64), "gpt": (4, 16)}
STEPS = 3


def cases(section: Section) -> list[tuple[str, str, int]]:
    """(model, precision, batch) of all cases, in fp32 and in the half precision."""
    wanted = (precisions(section)[0], precisions(section)[-1])
    return [
        (name, how, 2 if section.quick else rows)
        for name in MODELS
        for how in wanted
        for rows in (BATCHES[name][:1] if section.quick else BATCHES[name])
    ]


def label(name: str, how: str, rows: int) -> str:
    return f"{name} {how} {rows}"


def train(
    name: str, rows: int, half: torch.dtype | None, section: Section, device: torch.device
) -> None:
    size = TINY if section.quick else FULL
    model = new_model(name, size).to(device)
    step = training_step(model, new_batch(name, size, rows, device), half)
    for _ in range(STEPS):
        step()


def make_workspaces(section: Section) -> None:
    """Train a tiny model: cuBLAS then has workspaces, in forward's and backward's thread."""
    for how in (precisions(section)[0], precisions(section)[-1]):
        with section.item(f"workspaces in {how}"), computing(how) as half:
            model = new_model("gpt", TINY).to(section.device)
            training_step(model, new_batch("gpt", TINY, 2, section.device), half)()


def real(section: Section) -> None:
    simulated = section.virtual()
    if section.device.type == "cuda":
        make_workspaces(section)
    for name, how, rows in cases(section):
        case = label(name, how, rows)
        gc.collect()
        with section.item(case), computing(how) as half:
            before = allocated = reserved = None
            if section.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            train(name, rows, half, section, section.device)
            if section.device.type == "cuda":
                allocated = torch.cuda.max_memory_allocated()
                reserved = torch.cuda.max_memory_reserved()
            found = simulated.get(case, {}).get("allocated")
            section.row(
                case=case,
                before=before,
                allocated=allocated,
                reserved=reserved,
                simulated=found,
                error=found and allocated and found / (allocated - before) - 1,
            )


def virtual(section: Section) -> None:
    for name, how, rows in cases(section):
        with (
            section.item(label(name, how, rows)),
            simulating(how, section) as device,
            computing(how) as half,
        ):
            train(name, rows, half, section, device)
            peak = torch.vgpu.max_memory_allocated(device)
            section.row(case=label(name, how, rows), allocated=peak)
        gc.collect()


if __name__ == "__main__":
    main(real, virtual)
