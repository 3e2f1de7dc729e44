"""The program of lesson 10's scripts: train with each strategy, compare, and report."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from multigpu import data, files, flags, launch, metrics, plots, proof
from multigpu.comparison.digits import new_model, train
from multigpu.comparison.link import measure_link
from multigpu.comparison.names import EXACT, NAMES, NO_LAUNCHER, strategy_for_short_run
from multigpu.comparison.pictures import (
    bytes_picture,
    consensus_picture,
    link_picture,
    measured_milliseconds,
)
from multigpu.comparison.rows import compare_with_serial, summarize, table
from multigpu.errors import pluralize
from multigpu.files import write_json
from multigpu.launch import prefork
from multigpu.models import CNN


def parser(stem: str, description: str, names: Sequence[str]) -> flags.Parser:
    """The flags of a script of lesson 10, which trains with `names` by default."""
    lesson_parser = flags.parser(stem, description)
    flag = lesson_parser.add_argument
    flag(
        "--strategy",
        nargs="+",
        metavar="NAME",
        help=f"all, or some of: {', '.join(NAMES)} (default: {' '.join(names)})",
    )
    flag(
        "--ranks",
        type=flags.positive,
        default=2,
        help="processes; nodes for ddp2, devices for dp (default: 2)",
    )
    flag(
        "--hidden",
        type=flags.positive,
        default=64,
        help="units of the model's widest layer (default: 64)",
    )
    flag(
        "--link",
        type=flags.positive_float,
        default=100,
        metavar="MBIT",
        help="a link's Mbit/s (default: 100)",
    )
    flag(
        "--measure-link",
        action="store_true",
        help="measure a step's time over such a link, which this script sets up (as root)",
    )
    lesson_parser.set_defaults(lessons_strategies=list(names))
    return lesson_parser


def run(args: argparse.Namespace, script: str) -> None:
    """Train with each strategy of `args`, and report; `script` is the program's file.

    Under a launcher, strategies that need one process, or start their own, are left out unless
    --strategy names them.
    """
    world = launch.find_world()
    launched = world.size > 1
    ranks = world.size if launched else args.ranks
    batch = flags.split_batch(args.batch_size, ranks)

    names = args.strategy or args.lessons_strategies
    if "all" in names:
        names = list(NAMES)
    if launched and names != args.strategy:
        names = [name for name in names if name not in (*NO_LAUNCHER, "ddp2")]
    for name in names:
        strategy_for_short_run(name)  # reports a wrong name before anything starts
    if world.rank == 0:
        files.writable_folder(args.out)
    if not launched:
        prefork.start_server()  # the ranks of all strategies are its forks
    train_set, test_set = data.load(data.fetch(args.data))

    spawned = [name for name in names if name not in (*NO_LAUNCHER, "ddp2")]
    if launched:
        records = train(names, args, batch)
    else:
        records = train([name for name in names if name in NO_LAUNCHER], args, batch)
        # ddp2 changes the processes' environment, so it gets processes of its own.
        for group in (spawned, [name for name in names if name == "ddp2"]):
            if group:
                records |= launch.call(train, ranks, group, args, batch)[0]
    if world.rank > 0:
        return

    def fresh() -> CNN:
        return new_model(train_set, test_set, args)

    rows = {}
    for name in names:
        rows[name] = summarize(name, records[name], fresh(), test_set, args.link)
        metrics.check_loss(rows[name]["loss"], args.epochs - 1, world)

    if args.prove:
        compare_with_serial(
            rows, records, fresh, train_set, args, batch_size=batch.global_size
        )
    if args.measure_link:
        same = ["--epochs", 1, "--hidden", args.hidden, "--batch-size", batch.global_size]
        if args.data:
            same += ["--data", args.data]
        measure_link(rows, script, spawned, same, args.link)
    report(rows, args, world, ranks=ranks, batch_size=batch.global_size)


def report(
    rows: dict[str, dict],
    args: argparse.Namespace,
    world: launch.World,
    *,
    ranks: int,
    batch_size: int,
) -> None:
    """Print the table, the proof and the measured times; save the figures and metrics.json.

    With --prove the strategies of EXACT must equal the serial run; exit code 1 if they do
    not. The loss and accuracy in metrics.json are ddp's; without ddp, the first strategy's.
    `batch_size` is the number of images in a global batch of all `ranks`.
    """
    print(table(rows, ranks))
    if "difference_from_adam" in rows.get("bagua:qadam", {}):
        print(
            f"bagua:qadam is compared with QAdam in one process. From Adam it is "
            f"{rows['bagua:qadam']['difference_from_adam']:.0e} away."
        )
    verdict = _verdict(rows, args)
    times = measured_milliseconds(rows)
    if times:
        slow = times.get("ddp", max(times.values()))
        for name, ms in times.items():
            faster = f" ({slow / ms:.1f} times as fast)" if ms != slow else ""
            print(f"measured at {args.link:g} Mbit/s: {name} {ms:.0f} ms per step{faster}")
    pictures = {
        "bytes": bytes_picture(rows),
        "consensus": consensus_picture(rows),
        "link": link_picture(rows, args.link),
    }
    for name, picture in pictures.items():
        plots.save(picture, args.out / f"{name}.png")
    print(f"figures: {args.out}/{{{','.join(pictures)}}}.png")
    representative = rows.get("ddp") or next(iter(rows.values()))
    metrics = {
        "world_size": ranks,
        "nodes": world.nodes,
        "launcher": world.launcher,
        "devices": ranks,
        "device": representative["device"],
        "batch_size": batch_size,
        "link_megabits": args.link,
        "loss": representative["loss"],
        "test_accuracy": representative["test_accuracy"],
        "proof": verdict,
        "strategies": rows,
    }
    print(f"metrics: {write_json(args.out / 'metrics.json', metrics)}", flush=True)
    if verdict and not verdict["holds"]:
        sys.exit(1)


def _verdict(rows: dict[str, dict], args: argparse.Namespace) -> dict[str, Any] | None:
    """Print and return the proof; None without --prove, or if none of EXACT was run."""
    differences = {
        name: row["difference_from_serial"]
        for name, row in rows.items()
        if name in EXACT and "difference_from_serial" in row
    }
    if differences:
        epochs = pluralize(args.epochs, "epoch")
        claim = f"{next(iter(differences))} equals one process after {epochs}"
        if len(differences) > 1:
            print(f"compared with serial: {', '.join(differences)}")
            claim = f"these {len(differences)} equal one process after {epochs}"
        return proof.verdict(claim, proof.largest(differences.values()), 1e-5)
    if args.prove:
        print("proof: none of these strategies equals one process: see 'from serial' above")
    return None
