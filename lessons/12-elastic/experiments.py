"""The longer experiments of lesson 12: curves of runs that were stopped, and small traps."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.utils.data import ElasticDistributedSampler

from multigpu import data, elastic, files, launch, plots
from multigpu.errors import UserError, pluralize
from multigpu.launch import rendezvous
from multigpu.models import CNN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LISTENER = Path(__file__).with_name("listener.py")  # the rank of `signals`


# ---- loss curves of a run that was stopped --------------------------------------------------


def finished_run(out: str | Path, epochs: int) -> dict:
    """The metrics.json of the finished run in `out`.

    Its curve has [loss, world size, number of start] of each step. Raises UserError if no run
    has finished there, or one with another number of epochs.
    """
    try:
        run = json.loads(Path(out, "metrics.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{out} has no finished run: run the cell above first.") from None
    if len(run["epochs"]) != epochs:
        raise UserError(
            f"the run in {out} has {pluralize(len(run['epochs']), 'epoch')}, not {epochs}: "
            f"run the cell with --epochs {epochs} first."
        )
    return run


def checkpoint_of_step(out: str | Path, step: int) -> Path:
    """The checkpoint of this step in OUT/checkpoints. Raises UserError if there is none."""
    for path in (Path(out) / "checkpoints").glob(f"step-{step:08d}-*.pt"):
        return path
    raise UserError(
        f"{out} has no good checkpoint of step {step}: run the cell with --kill first, which "
        f"begins a new run."
    )


def draw_restart(
    whole: list[list], killed: list[list], killed_in: int, title: str
) -> "Figure":
    """The loss of each step: a run without a stop as a line, another run's starts as dots.

    A vertical line marks the step of the kill, an arrow the way back to the last checkpoint.
    """
    fig = plots.figure(8, 3)
    axes = fig.add_subplot()
    axes.plot([loss for loss, *_ in whole], color=plots.INK, label="without a stop")
    starts = sorted({start for *_, start in killed})
    for index, start in enumerate(starts):
        steps = [step for step, row in enumerate(killed) if row[2] == start]
        losses = [killed[step][0] for step in steps]
        look = {**plots.curve_look(index), "linestyle": "", "markersize": 4}
        axes.plot(steps, losses, label=f"start {start}", **look)
    axes.set(xlabel="step", ylabel="loss", title=title, ylim=(0, None))
    saved = sum(start == 1 for *_, start in killed)
    high = 0.85 * axes.get_ylim()[1]
    axes.axvline(killed_in, color=plots.INK, linestyle="--", linewidth=1)
    axes.text(killed_in + 0.7, high, f"SIGKILL in step {killed_in}", va="center")
    plots.arrow(axes, (killed_in, high), (saved, high))
    axes.text(saved - 0.7, high, f"step {saved}", ha="right", va="center")
    axes.legend()
    return fig


def draw_losses(losses: dict[str, list[float]], since: int, title: str) -> "Figure":
    """The loss of each epoch from `since` on, on a logarithmic axis: up to three runs."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    fig = plots.figure(8, 3)
    axes = fig.add_subplot()
    for index, (name, values) in enumerate(losses.items()):
        # The first curve is a broad band: another one that covers it is visible on it.
        look = {**plots.curve_look(index), "linestyle": ("-", "--", ":")[index]}
        look |= {"linewidth": 2, "markersize": 5}
        if index == 0:
            look |= {"linewidth": 8, "marker": "", "alpha": 0.35}
        axes.plot(range(since, len(values) + 1), values[since - 1 :], label=name, **look)
    axes.set(xlabel="epoch", ylabel="loss", title=title, yscale="log")
    axes.set_yticks([0.5, 0.2, 0.1, 0.05])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=9)
    return fig


def draw_worlds(curve: list[list], title: str) -> "Figure":
    """World size and loss of each step, one panel each."""
    fig = plots.figure(8, 3.6)
    sizes, losses = fig.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    sizes.step(range(len(curve)), [size for _, size, _ in curve], color=plots.RED)
    sizes.set(ylabel="ranks", ylim=(0, 2.5), yticks=(1, 2), title=title)
    losses.plot([loss for loss, *_ in curve], color=plots.BLUE)
    losses.set(xlabel="step", ylabel="loss", ylim=(0, None))
    return fig


# ---- traps ----------------------------------------------------------------------------------


def elastic_sampler(images: int = 1000, resumed_at: int = 500) -> tuple[int, int]:
    """(lost, repeated) images of an epoch with ElasticDistributedSampler, resumed once.

    Two ranks train on the first `resumed_at` images of the epoch; four on what the sampler
    calls the rest.
    """
    dataset = range(images)
    seen: Counter[int] = Counter()
    for rank in range(2):
        sampler = ElasticDistributedSampler(dataset, 2, rank)
        seen.update(list(sampler)[: resumed_at // 2])
    for rank in range(4):
        seen.update(ElasticDistributedSampler(dataset, 4, rank, start_index=resumed_at))
    return images - len(seen), sum(count - 1 for count in seen.values())


def hang(timeout: int) -> str:
    """Rank 1 never joins the all-reduce. Returns how rank 0's wait ended, and "" on rank 1."""
    world = launch.find_world()
    store = rendezvous.open_store(world, torch.device("cpu"))
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit
    )
    if world.rank == 1:
        time.sleep(timeout + 2)
        return ""
    try:
        with elastic.report_lost_ranks():
            dist.all_reduce(torch.ones(1))
    except UserError as error:
        return str(error)
    return "the all-reduce returned"


def after_four_ranks_became_eight(
    batch: int, lr: float, epochs: int = 10, seed: int = 0
) -> dict[str, list[float]]:
    """The loss by epoch if, after two epochs, the global batch and the rate stay or do not.

    Serial runs: DDP computes the same for these global batches.
    """
    train, _ = data.load(data.fetch(None))
    ways = {
        "batch and rate stay": (batch, lr),
        "batch of a rank stays": (2 * batch, lr),
        "batch of a rank stays, rate × 2": (2 * batch, 2 * lr),
    }
    return {
        name: _losses(train, epochs, (batch, lr), later, seed) for name, later in ways.items()
    }


def _losses(
    train: torch.utils.data.TensorDataset,
    epochs: int,
    first: tuple[int, float],
    later: tuple[int, float],
    seed: int,
) -> list[float]:
    images, labels = train.tensors
    torch.set_num_threads(1)  # faster for small batches
    torch.manual_seed(seed)
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), first[1], momentum=0.9)
    losses = []
    for epoch in range(epochs):
        batch, optimizer.param_groups[0]["lr"] = first if epoch < 2 else later
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(len(train), generator=generator)
        total = 0.0
        for rows in order.split(batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / len(train))
    return losses


def run_killed(program: Callable[[], None]) -> None:
    """Run `program`, which kills itself by SIGKILL, in a fork of this process.

    Raises RuntimeError if it ends in another way.
    """
    child = os.fork()
    if child == 0:
        # The fork must not go on with what its parent does after this call.
        try:
            program()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise RuntimeError("the program was not killed")


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def file_by_file() -> tuple[int, int]:
    """The steps of the model and the optimizer that a killed run leaves.

    Each is in a file of its own, which is renamed when it is complete. The kill comes between
    the two files of step 20.
    """
    with tempfile.TemporaryDirectory() as name:
        model, optimizer = Path(name) / "model.json", Path(name) / "optimizer.json"

        def save_half() -> None:
            files.write_json(model, {"step": 20})
            kill_this_process()
            files.write_json(optimizer, {"step": 20})

        for path in (model, optimizer):
            files.write_json(path, {"step": 10})
        run_killed(save_half)
        steps = [json.loads(path.read_text())["step"] for path in (model, optimizer)]
    return steps[0], steps[1]


def killed_while_writing() -> tuple[list[str], list[str]]:
    """The files in a checkpoint folder after a kill, and after the next start opens it.

    A fork of this process writes half of step 20's checkpoint, and ends by SIGKILL.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = elastic.CheckpointFolder(Path(name))
        folder.write(10, {"step": 10})

        def write_half() -> None:
            path = folder.path / elastic.checkpoint_name(20, b"whole")
            with files.atomic(path) as temporary:
                temporary.write_bytes(b"who")
                kill_this_process()

        run_killed(write_half)
        after_kill = _names(folder.path)
        folder.open()
        folder.close()
        return after_kill, _names(folder.path)


def _names(folder: Path) -> list[str]:
    """The names of the checkpoints and of temporary files, without checksums."""
    names = sorted(path.name for path in folder.iterdir() if "step" in path.name)
    return [name.rpartition("-")[0] for name in names]


def signals(*cases: tuple[str, tuple[str, ...]]) -> list[dict]:
    """Send a signal to a torchrun whose rank ignores it; the cases run at the same time.

    A case has the signal's name and further flags of torchrun. The rank runs listener.py.
    Returns for each case: the signals that the rank reported, whether it reported that its
    launcher, torchrun, has died, and torchrun's exit code.
    Raises UserError if a torchrun ends before its rank is ready.
    """
    started = []
    for name, flags in cases:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr=127.0.0.1", *flags, str(LISTENER)]
        torchrun = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started.append((name, torchrun))
    try:
        for name, torchrun in started:
            _wait_until_ready(torchrun)
            torchrun.send_signal(getattr(signal, name))
        return [_outcome(torchrun) for _, torchrun in started]
    finally:
        for _, torchrun in started:
            if torchrun.poll() is None:
                torchrun.terminate()
            torchrun.communicate()


def signals_to_torchrun() -> dict[str, str]:
    """What a rank receives if its torchrun gets SIGTERM, SIGUSR1, and SIGUSR1 that it handles.

    "nothing" if it receives nothing. How each torchrun ends is printed.
    """
    short = "--shutdown-timeout=5"  # seconds until torchrun sends SIGKILL; 30 if not given
    handled = "--signals-to-handle=SIGTERM,SIGUSR1"
    cases = {
        "SIGTERM": ("SIGTERM", (short,)),
        "SIGUSR1": ("SIGUSR1", ()),
        "SIGUSR1, named": ("SIGUSR1", (handled, short)),
    }
    received = {}
    for name, result in zip(cases, signals(*cases.values()), strict=True):
        signal_name, flags = cases[name]
        received[name] = ", ".join(result["signals"]) or "nothing"
        died = ", and its launcher has died" if result["launcher died"] else ""
        print(
            f"{signal_name}, {' '.join(flags) or 'no flag'}: torchrun ends with "
            f"{result['exit code']}\n    the rank received {received[name]}{died}"
        )
    return received


def _wait_until_ready(torchrun: subprocess.Popen) -> None:
    if not any("ready" in line for line in torchrun.stdout):
        raise UserError(
            f"torchrun ended with {torchrun.wait()} before its rank was ready: "
            f"start it in a terminal, with the same flags, and read its message."
        )


def _outcome(torchrun: subprocess.Popen) -> dict:
    # The rank has the same pipe: its end is reached when torchrun and the rank have ended.
    lines = torchrun.stdout.read().splitlines()
    reported = [line.removeprefix("rank: ") for line in lines if line.startswith("rank: ")]
    return {
        "signals": [line for line in reported if line.startswith("SIG")],
        "launcher died": "its torchrun has died" in reported,
        "exit code": torchrun.wait(),
    }
