"""`multigpu virtual`: a CUDA program, unchanged, on virtual GPUs."""

import os
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from multigpu.errors import UserError, pluralize
from multigpu.virtual import command as _command
from multigpu.virtual import options as _options
from multigpu.virtual import report as _report
from multigpu.virtual.options import Options
from multigpu.virtual.prediction import Prediction
from multigpu.virtual.record import read_records
from multigpu.virtual.report import Files

PICTURES = (".png", ".svg", ".pdf")


def virtual(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="script.py …, python script.py …, -m module …, or torchrun …",
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(
            help="GPUs that the program sees.",
            show_default="torchrun's ranks, at least 2, the fewest that share work",
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(help="Its name, such as A100-80GB; a file; or one for each: A10,T4."),
    ] = Options.gpu,
    link: Annotated[
        str, typer.Option(help="Link inside a node, such as NVLink4 or PCIe4.")
    ] = Options.link,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs in each node; with --between-nodes.")
    ] = None,
    between_nodes: Annotated[
        str | None, typer.Option(help="Link between nodes, such as HDR200 or Ethernet10.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Each GPU's memory, such as 512MiB.", show_default="the GPU's"),
    ] = None,
    shapes_only: Annotated[
        bool, typer.Option("--shapes-only", help="Tensors have shapes but no numbers.")
    ] = False,
    clock: Annotated[
        str, typer.Option(help="The clock that the program reads: real or simulated.")
    ] = Options.clock,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a run that stands still is ended.")
    ] = Options.timeout,
    kill_rank: Annotated[
        str | None,
        typer.Option(help="RANK@NUMBER: kill a rank at its collective of that number."),
    ] = None,
    slow_rank: Annotated[
        str | None,
        typer.Option(help="RANK:FACTOR: let a rank take so many times as long."),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(help="Run as one rank of so many; each node has --gpus-per-node GPUs."),
    ] = None,
    as_rank: Annotated[
        list[str] | None,
        typer.Option(
            help="With --world: the rank that runs, or several: 0,8,16.", show_default="0"
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="End the program after so many optimizer steps.")
    ] = None,
    samples_per_step: Annotated[
        int | None,
        typer.Option(help="Samples of one step of all ranks, for samples/s."),
    ] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(help="Tokens of one step of all ranks, for tokens/s.")
    ] = None,
    traffic: Annotated[
        bool,
        typer.Option("--traffic", help="Report the bytes from rank to rank, from GPU to GPU."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the timeline into this .png, .svg or .pdf.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline for ui.perfetto.dev.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report", help="Write the report as one HTML file: a timeline to zoom."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report's numbers into this file.")
    ] = None,
) -> None:
    """Run a CUDA program, unchanged, on virtual GPUs, which this machine's CPU simulates.

    The program sees cuda:0, cuda:1, … with their memory and their errors. The report at the
    end, on stderr, has the simulated time. The exit code is the program's.

    With --world the program is one rank of a large world, and the report has the time of a
    step, in a range: the program runs twice, the second time without output.
    """
    if world is not None and gpus is not None:
        raise UserError(
            "--gpus does not go with --world: say with --gpus-per-node how many GPUs each "
            "node of the world has."
        )
    if world is None and as_rank:
        raise UserError("--as-rank needs --world: give the number of ranks, too.")
    if world is not None:
        gpus = min(world, gpus_per_node or world)
        if gpus == world and between_nodes is None:
            # All ranks are on one node, and no network is between.
            gpus_per_node = None
    models = _options.gpus_of(gpu)
    if gpus is None and isinstance(models, tuple):
        gpus = len(models)
    if gpus is None and (real := _command.real_gpus()):
        raise UserError(
            f"this machine has {pluralize(real, 'GPU')}, on which the program can run without "
            f"`multigpu virtual`: to simulate GPUs nevertheless, say how many with --gpus."
        )
    options = Options(
        gpus=max(Options.gpus, _command.ranks_of_torchrun(command)) if gpus is None else gpus,
        gpu=models,
        link=link,
        gpus_per_node=gpus_per_node,
        between_nodes=between_nodes,
        memory=None if memory is None else _options.memory_in_bytes(memory),
        shapes_only=shapes_only,
        clock=clock,
        timeout=timeout,
        kill_rank=kill_rank,
        slow_rank=slow_rank,
        world=world,
        ranks=_options.ranks_of(as_rank or ["0"]),
        steps=steps,
        samples_per_step=samples_per_step,
        tokens_per_step=tokens_per_step,
        history=page is not None,
    )
    _options.check(options)
    check_files(
        {"--picture": picture, "--trace": trace, "--report": page, "--json": json_file}
    )
    with tempfile.TemporaryDirectory(
        prefix="multigpu-virtual-", ignore_cleanup_errors=True
    ) as folder:
        code = _command.run(command, options, Path(folder))
        report = _report.Report(Path(folder), options)
        if world is not None and code == 0 and report.prediction is not None:
            report.at_peaks = _predict_at_peaks(command, options, Path(folder) / "peaks")
    print(f"\n{report.text(code, traffic)}", file=sys.stderr)
    try:
        files = Files(picture, trace, page, json_file)
        for line in _report.write(report, code, files, shlex.join(command)):
            print(line, file=sys.stderr)
    except UserError as error:
        # The exit code is the program's.
        print(f"error: {error}", file=sys.stderr)
    _command.end_as(code)


def _predict_at_peaks(command: list[str], options: Options, folder: Path) -> Prediction | None:
    """The prediction with kernels that reach the data sheet's peaks, from a second run.

    If that run fails or makes no step, it says so, and returns None.
    """
    folder.mkdir()
    print("\nonce more, without output, at the data sheet's peaks …", file=sys.stderr)
    code = _command.run(command, replace(options, peaks=True), folder, quiet=True)
    prediction = Prediction.of(read_records(folder), options) if code == 0 else None
    if prediction is None:
        failure = (
            f"ended with exit code {code}"
            if code
            else "made no step, as if it went on from the first run's checkpoint"
        )
        print(
            f"the second run {failure}, so the times below are no range, but those at sourced "
            f"efficiencies: a range needs a program that can run twice.",
            file=sys.stderr,
        )
    return prediction


def check_files(files: dict[str, Path | None]) -> None:
    """Raise UserError for a file that cannot be written: now, not after hours of a run."""
    for flag, path in files.items():
        if path is None:
            continue
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise UserError(
                f"{flag} is {path}, which cannot be written: give a file in a folder that "
                f"exists and that you may write to."
            )
        if flag == "--picture" and path.suffix not in PICTURES:
            raise UserError(
                f"--picture is {path}: give a file that ends in {', '.join(PICTURES)}."
            )
