"""`multigpu scaling`: predict a data-parallel step on many GPUs, or draw measured ones."""

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from multigpu.errors import UserError


def scaling(
    model: Annotated[
        str | None,
        typer.Option(help="cnn, resnet50, bert:large, gpt:24x2304x24 (layers×hidden×heads)"),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="The GPU's name, such as A100-80GB.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Link inside a node, such as NVLink3.")
    ] = None,
    between_nodes: Annotated[
        str | None, typer.Option(help="Link between nodes, such as HDR200 or Ethernet10.")
    ] = None,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, with commas.")] = "1,8,64,1024",
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs in each node; 8 with --between-nodes.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Strong scaling: samples per step, all GPUs together.")
    ] = None,
    per_gpu: Annotated[
        int | None, typer.Option(help="Weak scaling (default): samples per step, each GPU.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    spread: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of a rank's step times ÷ their mean.", show_default="0.02"
        ),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(help="Measured: milliseconds of a step of one GPU, without DDP."),
    ] = None,
    step_samples: Annotated[
        int | None, typer.Option(help="Samples of that step; by default those of --per-gpu.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Workers of a GPU's DataLoader; with --worker-rate.")
    ] = None,
    worker_rate: Annotated[
        float | None, typer.Option(help="Samples per second that one worker prepares.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the numbers into this file.")
    ] = None,
    measured_runs: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            metavar="FOLDER",
            help="Instead: draw lesson 13's runs in FOLDER/*/ into FOLDER/scaling.png.",
        ),
    ] = None,
) -> None:
    """Predict where data-parallel training falls below 80% efficiency, and what costs most.

    With --measured FOLDER, draw the speed-ups of measured runs instead.
    """
    if measured_runs:
        from multigpu.scaling.points import gather

        gather(measured_runs)
        return
    if model is None or gpu is None or link is None:
        raise UserError(
            "a prediction needs --model, --gpu and --link, such as --model resnet50 "
            "--gpu A100-80GB --link NVLink3; --measured FOLDER draws measured runs."
        )
    if (workers is None) != (worker_rate is None):
        raise UserError("--workers and --worker-rate belong together: give both, or neither.")
    if step_ms is None and step_samples is not None:
        raise UserError("--step-samples needs --step-ms: the milliseconds of that step.")
    if step_ms is not None and step_samples is None and per_gpu is None:
        raise UserError("--step-ms needs --step-samples: how many samples the step had.")
    if json_file and (json_file.is_dir() or not os.access(json_file.parent, os.W_OK)):
        raise UserError(
            f"--json is {json_file}, which cannot be written: give a file in a folder that "
            f"exists and that you may write to."
        )
    from multigpu.files import write_json
    from multigpu.scaling import Loader, Measured, predict, report
    from multigpu.scaling.stragglers import SPREAD

    measured = None
    if step_ms is not None:
        samples = per_gpu if step_samples is None else step_samples
        measured = Measured(step_ms / 1e3, samples)
    prediction = predict(
        model,
        gpu,
        link,
        between_nodes,
        gpus=_numbers(gpus),
        gpus_per_node=gpus_per_node,
        global_batch=global_batch,
        per_gpu=per_gpu,
        precision=precision,
        spread=SPREAD if spread is None else spread,
        loader=None if workers is None else Loader(workers, worker_rate),
        measured=measured,
    )
    print(report.text(prediction))
    if json_file:
        print(f"numbers: {write_json(json_file, report.as_json(prediction))}")


def _numbers(text: str) -> list[int]:
    """1,8,64 as numbers. Raises UserError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"-?\d+", part) for part in parts):
        raise UserError(
            f"--gpus is {text!r}: give whole numbers with commas, such as 1,8,64,1024."
        )
    return [int(part) for part in parts]
