"""How is a run told, in a table, a figure and a file? The same way in every lesson, so that lessons can be compared."""

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from multigpu import plots
from multigpu.errors import UserError, pluralize
from multigpu.files import write_json
from multigpu.launch.world import World


def header() -> str:
    """The head of the table of epochs."""
    return f"{'epoch':>5}  {'loss':>8}  {'test accuracy':>13}  {'images/s':>9}"


def opening(at: dict, args: Namespace, loaded: Path | None, world: World) -> str:
    """What stands above the first new epoch: where a resumed run goes on, the head of the table, the epochs before.

    `at` is the position: epoch and step that are done, and history, a list of what `row` takes. `args` holds resume,
    epochs and out; `loaded` is the checkpoint's path, None where the run starts anew. Raises UserError if the checkpoint
    lies within an epoch that `args` does not ask for.
    """
    lines = [header(), *map(row, at["history"])]
    if args.resume is None:
        return "\n".join(lines)
    if loaded is None:
        return "\n".join(
            [f"--resume: no checkpoint in {args.out} yet, so the run starts anew\n", *lines]
        )
    done = pluralize(at["epoch"], "epoch") + (
        f" and {pluralize(at['step'], 'step')}" if at["step"] else ""
    )
    more = at["epoch"] < args.epochs
    if at["step"] and not more:
        raise UserError(
            f"{loaded} has {done} done, and --epochs {args.epochs} would end before: give --epochs {at['epoch'] + 1} or more.",
            already_reported=world.rank != 0,
        )
    rest = (
        f"of {args.epochs}"
        if more
        else f"and --epochs {args.epochs} asks for no more: nothing is trained"
    )
    return "\n".join([f"resumed from {loaded}: {done} done, {rest}\n", *lines])


def row(epoch: dict) -> str:
    """One line of the table. `epoch` holds epoch (from 1), loss (mean over images), test_accuracy, images_per_s."""
    speed = f"{epoch['images_per_s']:>9,.0f}"
    return (
        f"{epoch['epoch']:>5}  {epoch['loss']:>8.4f}  {epoch['test_accuracy']:>13.4f}  {speed}"
    )


def finite(loss: float, epoch: int, world: World) -> float:
    """The loss, if it is a number. Raises UserError otherwise: nothing comes back from there. `epoch` counts from 0."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} in epoch {epoch + 1}: lower --lr.",
            already_reported=world.rank != 0,
        )
    return loss


def progress(batches: Iterable, world: World) -> Iterable:
    """A progress bar on rank 0's terminal; nothing in a log or a notebook, which would keep every state of the bar."""
    bar = world.rank == 0 and sys.stderr.isatty() and "JPY_PARENT_PID" not in os.environ
    return tqdm(batches, leave=False, disable=not bar)


def report(
    out: Path,
    world: World,
    device: torch.device,
    epochs: list[dict],
    verdict: dict | None,
    **told: object,
) -> None:
    """On rank 0: print the accuracy, write training.png and metrics.json into `out`. Exit code 1 if the proof fails.

    `epochs` is a list of what `row` takes, `verdict` is proof.verdict's, `told` is what else the lesson wants kept.
    """
    accuracy, loss = epochs[-1]["test_accuracy"], epochs[-1]["loss"]
    title = f"{pluralize(world.size, 'rank')}, {pluralize(len(epochs), 'epoch')}: test accuracy {accuracy:.3f}"
    print(f"test accuracy: {accuracy:.4f}")
    print(f"figure: {plots.curves(epochs, out / 'training.png', title)}")
    place = {
        "world_size": world.size,
        "nodes": world.nodes,
        "launcher": world.launcher,
        "device": device.type,
    }
    place["devices"] = world.size  # one a rank, unless `told` knows better
    content = {
        **place,
        **told,
        "loss": loss,
        "test_accuracy": accuracy,
        "epochs": epochs,
        "proof": verdict,
    }
    print(f"metrics: {write_json(out / 'metrics.json', content)}", flush=True)
    if verdict and not verdict["holds"]:
        sys.exit(1)


def line(route: str, folder: str | Path) -> str:
    """One line of the table of all routes, from the metrics.json in `folder`: rounded to what is stable everywhere."""
    told = json.loads((Path(folder) / "metrics.json").read_text())
    proof = (
        "not tried"
        if told["proof"] is None
        else "holds"
        if told["proof"]["holds"]
        else "fails"
    )
    what = f"{told['devices']} × {told['device']}"
    return f"| {route} | {what} | loss {told['loss']:.2f} | accuracy {told['test_accuracy']:.2f} | proof {proof} |"
