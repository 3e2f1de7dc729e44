"""Section: the same numbers: models trained on the real GPU and on a virtual one.

Both start from the same weights and batches, in float32 without TF32. The losses of all steps
and the weights after the last one are compared. The limits are relative to the largest value.
"""

from pathlib import Path

import torch
from section import Section, main
from workloads import MODELS, TINY, Size, compute_exactly, new_batch, new_model
from workloads import training_step as new_step

from multigpu import vgpu

STEPS = 4
# Rows of a batch, and the limits for losses and weights. ResNet-50's BatchNorm divides by
# small deviations, so the last bits of its sums grow with each step.
LIMITS = {"cnn": (64, 1e-5, 1e-5), "resnet50": (8, 1e-3, 1e-2), "gpt": (2, 1e-4, 1e-4)}
SMALL = Size(image=64, layers=2, width=128, heads=4, length=64, words=1000)


def train(name: str, section: Section, device: torch.device) -> tuple[list, torch.Tensor]:
    """The losses of STEPS steps, and all weights in one vector on the CPU."""
    compute_exactly()
    size = TINY if section.quick else SMALL
    rows = 2 if section.quick else LIMITS[name][0]
    model = new_model(name, size).to(device)
    step = new_step(model, new_batch(name, size, rows, device))
    losses = [step().item() for _ in range(STEPS)]
    return losses, torch.cat(
        [weight.detach().cpu().flatten() for weight in model.parameters()]
    )


def real(section: Section) -> None:
    section.virtual()
    section.note("Dropout is left out: a GPU's random numbers differ from the CPU's.")
    for name in MODELS:
        with section.item(name):
            expected = torch.load(saved(section.path, name), weights_only=True)
            losses, weights = train(name, section, section.device)
            apart = [
                abs(a - b) / abs(b) for a, b in zip(losses, expected["losses"], strict=True)
            ]
            difference = (weights - expected["weights"]).abs().max() / weights.abs().max()
            _, loss_limit, weight_limit = LIMITS[name]
            holds = max(apart) <= loss_limit and difference.item() <= weight_limit
            section.row(
                case=f"{name}, {STEPS} steps",
                ok=holds,
                losses=losses,
                virtual_losses=expected["losses"],
                loss_difference=max(apart),
                loss_limit=loss_limit,
                weight_difference=difference.item(),
                weight_limit=weight_limit,
            )


def saved(path: Path, name: str) -> Path:
    """The file with the virtual side's losses and weights of a model."""
    stem = path.name.removesuffix(".json").removesuffix(".virtual")
    return path.with_name(f"{stem}.{name}.pt")


def virtual(section: Section) -> None:
    with vgpu.running(1, gpu=section.card.gpu) as (device,):
        for name in MODELS:
            with section.item(name):
                losses, weights = train(name, section, device)
                torch.save({"losses": losses, "weights": weights}, saved(section.path, name))
                section.row(case=name, losses=losses)


if __name__ == "__main__":
    main(real, virtual)
