"""Section: simulated against measured time of training steps.

The models are the course's CNN, ResNet-50 and a small GPT; each in fp32, TF32 and bf16, at
several batch sizes. Beside the simulation's error is the null model's: a step takes as long
per row of the batch as in the model's smallest batch.
"""

import torch
from precision import computing, precisions, report_missing, simulating
from section import Section, main
from timing import simulated_step, step_times
from workloads import FULL, MODELS, TINY, new_batch, new_model, training_step

BATCHES = {"cnn": (64, 1024, 16_384), "resnet50": (8, 64, 256), "gpt": (2, 16, 64)}
TINY_BATCHES = {"cnn": (2, 4), "resnet50": (2,), "gpt": (1, 2)}


def cases(section: Section) -> list[tuple[str, str, int]]:
    """(model, precision, batch) of all steps."""
    batches = TINY_BATCHES if section.quick else BATCHES
    wanted = precisions(section)
    return [(name, how, rows) for name in MODELS for how in wanted for rows in batches[name]]


def label(name: str, how: str, rows: int) -> str:
    return f"{name} {how} {rows}"


def real(section: Section) -> None:
    simulated = section.virtual()
    report_missing(section)
    size = TINY if section.quick else FULL
    first: dict[tuple[str, str], float] = {}
    for name, how, rows in cases(section):
        case = label(name, how, rows)
        with section.item(case), computing(how) as half:
            model = new_model(name, size).to(section.device)
            batch = new_batch(name, size, rows, section.device)
            step = training_step(model, batch, half)
            times = step_times(step, section.device)
            first.setdefault((name, how), times.median / rows)
            found = simulated.get(case, {}).get("seconds")
            section.row(
                case=case,
                model=name,
                precision=how,
                batch=rows,
                measured=times.as_dict(),
                simulated=found,
                error=found and found / times.median - 1,
                null_error=first[name, how] * rows / times.median - 1,
            )
        model = batch = step = None
        if section.device.type == "cuda":
            torch.cuda.empty_cache()


def virtual(section: Section) -> None:
    size = TINY if section.quick else FULL
    host = torch.device("cpu")
    for name, how, rows in cases(section):
        case = label(name, how, rows)
        with section.item(case), simulating(how, section) as device, computing(how) as half:
            model = new_model(name, size).to(device)
            # One row of numbers would do, but `new_batch` draws in no time what it needs.
            batch = tuple(
                torch.empty(rows, *part.shape[1:], dtype=part.dtype, device=device)
                for part in new_batch(name, size, 1, host)
            )
            step = training_step(model, batch, half)
            section.row(case=case, seconds=simulated_step(step))


if __name__ == "__main__":
    main(real, virtual)
