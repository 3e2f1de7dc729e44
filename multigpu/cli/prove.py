"""`multigpu prove`: does a parallel training program compute what one GPU computes?"""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from multigpu.cli.virtual import check_files
from multigpu.launch.terminal import announce


def prove(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="torchrun --nproc-per-node=2 script.py …, script.py …, -m module …",
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Run on so many virtual GPUs.",
            show_default="as many as ranks, if the program says cuda",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Compare so many optimizer steps.",
            show_default="an epoch of at most 58 steps and two more, else 20",
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The command of the reference, in quotes.")
    ] = None,
    against: Annotated[
        int | None, typer.Option(help="Compare with so many ranks.", show_default="1")
    ] = None,
    self_check: Annotated[
        bool, typer.Option("--self", help="Run once, and compare the ranks with each other.")
    ] = False,
    no_dropout: Annotated[
        bool, typer.Option("--no-dropout", help="Switch dropout off in all runs.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the differences into this .png, .svg or .pdf.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report", help="Write verdict, picture and parameters into this .html."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers into this file.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a step after which a run hangs.")
    ] = 120.0,
) -> None:
    """Prove that a training program on several ranks or GPUs computes what one computes.

    The program, unchanged, runs with one rank or GPU, and with all. Weights and gradients are
    compared at each optimizer step. Without GPUs a program that says cuda runs on virtual
    ones, others on the CPU. Exit code: 0 holds, 1 fails, 2 nothing can be said.
    """
    check_files({"--picture": picture, "--json": json_file, "--report": page})
    signal.signal(signal.SIGTERM, _interrupt)
    from multigpu.prove import report, session

    try:
        result = session.run(
            command,
            gpus=gpus,
            steps=steps,
            reference=reference,
            against=against,
            self_check=self_check,
            timeout=timeout,
            no_dropout=no_dropout,
            announce=announce,
        )
    except KeyboardInterrupt:
        print(
            "interrupted: all processes have ended, and nothing was written", file=sys.stderr
        )
        raise SystemExit(130) from None
    for line in report.write(result, picture, json_file, page):
        print(line)
    print(result, flush=True)
    raise SystemExit(result.exit_code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
