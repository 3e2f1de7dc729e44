"""Report a run in a table, a figure and a file, in the same form in every lesson."""

import json
import math
import sys
import threading
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

import torch

from multigpu import plots
from multigpu.errors import UserError, pluralize
from multigpu.files import write_json
from multigpu.launch.world import World
from multigpu.terminal import is_terminal


def header() -> str:
    """The header of the table of epochs."""
    return f"{'epoch':>5}  {'loss':>8}  {'test accuracy':>13}  {'images/s':>9}"


def resume_header(at: dict, args: Namespace, loaded: Path | None, world: World) -> str:
    """The text above the first new epoch: where a resumed run continues, and the table so far.

    `at` is the position in the run: epoch (epochs done), step (steps done after them) and
    history (a list of what `row` takes). `args` has resume, epochs and out. `loaded` is the
    checkpoint's path, None if there was none.
    Raises UserError if the checkpoint is inside an epoch that `args` does not ask for.
    """
    table = [header(), *map(row, at["history"])]
    if args.resume is None:
        return "\n".join(table)
    if loaded is None:
        start = f"--resume: no checkpoint in {args.out} yet, so a new run starts\n"
        return "\n".join([start, *table])
    done = pluralize(at["epoch"], "epoch")
    if at["step"]:
        done += f" and {pluralize(at['step'], 'step')}"
    rest = f"of {args.epochs}"
    if at["epoch"] >= args.epochs:
        if at["step"]:
            raise UserError(
                f"{loaded} has {done} done, but with --epochs {args.epochs} the run ends "
                f"before that: give --epochs {at['epoch'] + 1} or more.",
                already_reported=world.rank != 0,
            )
        rest = f"and --epochs {args.epochs} asks for no more: nothing is trained"
    return "\n".join([f"resumed from {loaded}: {done} done, {rest}\n", *table])


def row(epoch: dict) -> str:
    """One line of the table of epochs.

    `epoch` has epoch (from 1), loss (mean over images), test_accuracy and images_per_s, which
    is None if no image of a resumed epoch was left to train on: "–" in the table.
    """
    speed = "–" if epoch["images_per_s"] is None else f"{epoch['images_per_s']:,.0f}"
    loss = f"{epoch['loss']:>8.4f}"
    accuracy = f"{epoch['test_accuracy']:>13.4f}"
    return f"{epoch['epoch']:>5}  {loss}  {accuracy}  {speed:>9}"


def check_loss(loss: float, epoch: int, world: World) -> float:
    """Return the loss of epoch `epoch` (from 0).

    Raises UserError if the loss is infinite or NaN: training does not recover from that.
    """
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} in epoch {epoch + 1}: lower --lr.",
            already_reported=world.rank != 0,
        )
    return loss


def progress(batches: Iterable, world: World) -> Iterable:
    """The batches, with a progress bar on rank 0's terminal.

    A log or a notebook gets no bar, because it would keep every state of the bar. Without tqdm
    there is no bar.
    """
    if world.rank != 0 or not is_terminal():
        return batches
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return batches
    # Only this process draws a bar. tqdm's own lock has a semaphore for several processes: if
    # a signal ended this process, Python would warn of a leaked semaphore.
    tqdm.set_lock(threading.RLock())
    return tqdm(batches, leave=False)


def report(
    out: Path,
    world: World,
    device: torch.device,
    epochs: list[dict],
    verdict: dict | None,
    **extra: object,
) -> None:
    """On rank 0: print the accuracy, write training.png and metrics.json into `out`.

    `epochs` is a list of what `row` takes. `verdict` is what proof.verdict returned, or None.
    `extra` has further entries of metrics.json. Exits with code 1 if the proof fails.
    """
    accuracy = epochs[-1]["test_accuracy"]
    run = f"{pluralize(world.size, 'rank')}, {pluralize(len(epochs), 'epoch')}"
    title = f"{run}: test accuracy {accuracy:.3f}"
    print(f"test accuracy: {accuracy:.4f}")
    print(f"figure: {plots.curves(epochs, out / 'training.png', title)}")
    content = {
        "world_size": world.size,
        "nodes": world.nodes,
        "launcher": world.launcher,
        "device": device.type,
        # one device per rank, unless `extra` has another number
        "devices": world.size,
        **extra,
        "loss": epochs[-1]["loss"],
        "test_accuracy": accuracy,
        "epochs": epochs,
        "proof": verdict,
    }
    print(f"metrics: {write_json(out / 'metrics.json', content)}", flush=True)
    if verdict and not verdict["holds"]:
        sys.exit(1)


def finished_run(folder: str | Path) -> dict:
    """The content of the metrics.json that a finished run has written into `folder`.

    A run that begins sets an older metrics.json aside. Raises UserError if there is none: no
    run has finished in this folder since then.
    """
    path = Path(folder) / "metrics.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} has no finished run: run the cell above first.") from None


def route_row(route: str, folder: str | Path) -> str:
    """The route's line of the table of all routes, from the metrics.json in `folder`.

    The numbers are rounded to digits that are the same on every machine.
    """
    run = finished_run(folder)
    proof = "not tried"
    if run["proof"] is not None:
        proof = "holds" if run["proof"]["holds"] else "fails"
    devices = f"{run['devices']} × {run['device']}"
    loss = f"loss {run['loss']:.2f}"
    accuracy = f"accuracy {run['test_accuracy']:.2f}"
    return f"| {route} | {devices} | {loss} | {accuracy} | proof {proof} |"
