"""`multigpu memory`: what the training of a GPT needs in memory, before it runs."""

from typing import Annotated

import typer

from multigpu.errors import UserError
from multigpu.memory import Model, Step, Training, find_model, report
from multigpu.virtual.sim.presets import GPUS, find_preset


def memory(
    model: Annotated[
        str | None, typer.Option(help="gpt-125m, gpt-1.3b, gpt-7b, gpt-13b, …")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Your own model: its blocks.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Its hidden units.")] = None,
    heads: Annotated[int | None, typer.Option(help="Its heads of attention.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    vocabulary: Annotated[int, typer.Option(help="Different tokens.")] = 51_200,
    batch: Annotated[int, typer.Option(help="Sequences of a GPU's step.")] = 1,
    optimizer: Annotated[str, typer.Option(help="adamw, or sgd with momentum.")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32 or bf16-mixed (autocast).")] = "fp32",
    checkpointing: Annotated[str, typer.Option(help="none, selective or full.")] = "none",
    attention: Annotated[str, typer.Option(help="flash or math.")] = "flash",
    gpu: Annotated[
        str, typer.Option(help="The GPU's name, or several: A100-80GB,H100-80GB.")
    ] = "A100-80GB",
    gpus: Annotated[int, typer.Option(help="GPUs that share it, by DDP, ZeRO or FSDP.")] = 1,
) -> None:
    """Print what fills a GPU's memory in a training step of a GPT, and whether it fits.

    It is a formula for the GPT of lesson 14, checked against virtual GPUs. In data parallel
    training (DDP) each GPU has all of it, and buckets as large as the gradients. With --gpus,
    a second table has what each keeps of weights, gradients and optimizer state, and whether
    its peak fits.
    """
    if gpus < 1:
        raise UserError(f"--gpus is {gpus}: give a number from 1 up.")
    sizes = {"--layers": layers, "--hidden": hidden, "--heads": heads}
    flags = [flag for flag, number in sizes.items() if number is not None]
    if model is not None and flags:
        raise UserError(f"--model and {flags[0]} exclude each other: give one of them.")
    if model is None and len(flags) < len(sizes):
        missing = [flag for flag in sizes if flag not in flags]
        raise UserError(
            f"{', '.join(missing)} missing: give --model, such as --model gpt-1.3b, or all of "
            f"--layers, --hidden and --heads."
        )
    if model is not None:
        shape = find_model(model)
        layers, hidden, heads = shape.layers, shape.hidden, shape.heads
    size = Model(layers, hidden, heads, tokens, vocabulary)
    training = Training(batch, optimizer, precision, checkpointing, attention)
    names = [name.strip() for name in gpu.split(",")]
    steps = [Step(size, training, find_preset(name, GPUS)) for name in names]
    print(report.text(steps))
    if gpus > 1:
        print(report.shared(steps, gpus))
