"""Section: the same numbers: models trained on the real GPU and on a virtual one.

Both start from the same weights and batches, in float32 without TF32. The losses of all steps
and the weights after the last one are compared, relative to the largest value. The limit is
measured: FACTOR times what one unit in the last place of all first weights changes on the
virtual GPU, and at least FLOOR.
"""

from pathlib import Path

import torch
from section import Section, main
from workloads import MODELS, TINY, Size, compute_exactly, new_batch, new_model
from workloads import training_step as new_step

from multigpu.virtual import control

STEPS = 4
FACTOR, FLOOR = 10, 1e-5
# Rows of a batch.
ROWS = {"cnn": 64, "resnet50": 8, "gpt": 2}
SMALL = Size(image=64, layers=2, width=128, heads=4, length=64, words=1000)


def train(
    name: str, section: Section, device: torch.device, disturb: bool = False
) -> tuple[list, torch.Tensor]:
    """The losses of STEPS steps, and all weights in one vector on the CPU."""
    compute_exactly()
    size = TINY if section.quick else SMALL
    rows = 2 if section.quick else ROWS[name]
    model = new_model(name, size)
    if disturb:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    model = model.to(device)
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
            loss, weight = apart((losses, weights), (expected["losses"], expected["weights"]))
            rounding = apart(expected["disturbed"], (expected["losses"], expected["weights"]))
            loss_limit, weight_limit = (max(FACTOR * one, FLOOR) for one in rounding)
            section.row(
                case=f"{name}, {STEPS} steps",
                ok=loss <= loss_limit and weight <= weight_limit,
                losses=losses,
                virtual_losses=expected["losses"],
                loss_difference=loss,
                loss_limit=loss_limit,
                weight_difference=weight,
                weight_limit=weight_limit,
            )


def apart(
    one: tuple[list, torch.Tensor], other: tuple[list, torch.Tensor]
) -> tuple[float, float]:
    """The largest relative difference of losses, and that of weights."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(one[0], other[0], strict=True))
    weights = (one[1] - other[1]).abs().max() / other[1].abs().max()
    return losses, weights.item()


def saved(path: Path, name: str) -> Path:
    """The file with the virtual side's losses and weights of a model."""
    stem = path.name.removesuffix(".json").removesuffix(".virtual")
    return path.with_name(f"{stem}.{name}.pt")


def virtual(section: Section) -> None:
    with control.running(1, gpu=section.card.gpu) as (device,):
        for name in MODELS:
            with section.item(name):
                losses, weights = train(name, section, device)
                disturbed = train(name, section, device, disturb=True)
                content = {"losses": losses, "weights": weights, "disturbed": disturbed}
                torch.save(content, saved(section.path, name))
                section.row(case=name, losses=losses)


if __name__ == "__main__":
    main(real, virtual)
