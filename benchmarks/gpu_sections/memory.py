"""Section: peak memory of training steps, on the real GPU and on the virtual one."""

import gc

import torch
from section import Section, main
from workloads import (
    FULL,
    MODELS,
    TINY,
    computing,
    new_batch,
    new_model,
    precisions,
    simulating,
    training_step,
)

BATCHES = {"cnn": (1024, 16_384), "resnet50": (8, 64), "gpt": (4, 16)}


def cases(section: Section) -> list[tuple[str, str, int]]:
    """(model, precision, batch) of all cases, in fp32 and in the half precision."""
    wanted = precisions(section.gpu)
    return [
        (name, how, 2 if section.quick else rows)
        for name in MODELS
        for how in (wanted[0], wanted[-1])
        for rows in (BATCHES[name][:1] if section.quick else BATCHES[name])
    ]


def train(
    name: str, rows: int, half: torch.dtype | None, quick: bool, device: torch.device
) -> None:
    """Three steps; the weights, gradients and activations are freed at the end."""
    size = TINY if quick else FULL
    model = new_model(name, size).to(device)
    step = training_step(model, new_batch(name, size, rows, device), half)
    for _ in range(3):
        step()


def real(section: Section) -> None:
    simulated, cuda = section.virtual(), section.device.type == "cuda"
    for how in precisions(section.gpu):
        # cuBLAS then has workspaces, in forward's and in backward's thread.
        with section.item(f"workspaces in {how}"), computing(how) as half:
            train("gpt", 2, half, True, section.device)
    for name, how, rows in cases(section):
        case = f"{name} {how} {rows}"
        gc.collect()
        with section.item(case), computing(how) as half:
            before = allocated = reserved = None
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            train(name, rows, half, section.quick, section.device)
            if cuda:
                allocated = torch.cuda.max_memory_allocated()
                reserved = torch.cuda.max_memory_reserved()
            found = simulated.get(case, {}).get("allocated")
            section.row(
                case=case,
                kind=f"{name} {how}",
                before=before,
                allocated=allocated,
                reserved=reserved,
                simulated=found,
                error=found and allocated and found / (allocated - before) - 1,
            )


def virtual(section: Section) -> None:
    for name, how, rows in cases(section):
        case = f"{name} {how} {rows}"
        with (
            section.item(case),
            simulating(how, section.gpu) as device,
            computing(how) as half,
        ):
            train(name, rows, half, section.quick, device)
            section.row(case=case, allocated=torch.vgpu.max_memory_allocated(device))
        gc.collect()


if __name__ == "__main__":
    main(
        "The peak of three training steps. `before` is what cuBLAS's workspaces hold before "
        "the model, `allocated` what tensors and workspaces hold at the peak, `reserved` what "
        "the caching allocator has taken from the driver. `simulated` is without `before`: it "
        "is compared with `allocated` less `before`.",
        dict.fromkeys(("before", "allocated", "reserved", "simulated"), "MiB")
        | {"error": "%"},
        real,
        virtual,
    )
