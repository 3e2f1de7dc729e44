"""Send a signal to a process of an elastic run at a random moment, and check the result.

A fault's number is its seed. `run_fault` starts the run, sends the fault's signal once, gives
the command again until the run has finished, and compares it with a run without a stop.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
import warm
from commands import SUPPORT, alive, clean_environment, free_ports
from small_data import write_digits

from multigpu import data, elastic, proof
from multigpu.models import CNN

SCRIPT = SUPPORT / "elastic_instrumented.py"
IMAGES, BATCH, EPOCHS, SAVE_EVERY, LR, SEED = 35, 8, 30, 3, 0.05, 0
STEPS = EPOCHS * math.ceil(IMAGES / BATCH)
MOMENTS = ("start", "join", "ready", "step", "save", "evaluation", "any time")
# In how many steps, saves, evaluations the moment comes at the latest.
LATEST = {"step": STEPS - 10, "save": STEPS // SAVE_EVERY - 5, "evaluation": EPOCHS - 2}
LIMIT = 120.0  # seconds in which all processes of a start must have ended
# A line of a traceback that names a file of lesson 12.
OWN_LINE = re.compile(r'File "[^"]*(PT_CNN_Elastic\.py|multigpu/elastic/[^"]*)", line \d+')
STARTS = 4  # a run with one fault needs fewer


@dataclass(frozen=True)
class Fault:
    """Which process gets which signal, and when.

    agents   torchruns: one with `ranks` ranks, or two with one rank each that share a run
    target   "worker", "agent", or "host": the agent that hosts the rendezvous
    moment   one of MOMENTS
    count    the moment comes for the `count`-th time in its process
    at       for "any time": seconds after the start; fewer if the run has ended before
    rank     the rank that waits in the moment; the worker that gets the signal is the next
             rank if `neighbour`, else this one
    """

    seed: int
    agents: int
    ranks: int
    target: str
    signal: str
    moment: str
    count: int
    at: float
    rank: int
    neighbour: bool


def choose(seed: int) -> Fault:
    """The fault of this number: the same one each time."""
    source = random.Random(f"fault {seed}")
    agents = source.choice((1, 1, 2))
    ranks = 2 if agents == 2 else source.choice((2, 2, 3))
    target = source.choice(("worker", "worker", "agent", "host")[: 4 if agents == 2 else 3])
    moment = source.choice(MOMENTS)
    rank = source.randrange(ranks)
    if moment == "save":
        rank = 0  # it saves alone
    return Fault(
        seed=seed,
        agents=agents,
        ranks=ranks,
        target=target,
        signal=source.choice(("SIGKILL", "SIGKILL", "SIGTERM", "SIGUSR1")),
        moment=moment,
        count=source.randint(1, LATEST.get(moment, 1)),
        at=source.uniform(0.1, 4.0),
        rank=rank,
        neighbour=source.random() < 0.3,
    )


class Failed(AssertionError):
    """A fault had another result than it must have, or its signal reached no process."""


class TooLate(Failed):
    """The run ended before the moment of the fault."""


def run_fault(fault: Fault, folder: Path) -> dict:
    """Try one fault in an empty folder; return what happened. Raises Failed."""
    try:
        return _try(fault, folder)
    except TooLate:
        if fault.moment != "any time":
            raise
        return run_fault(replace(fault, at=fault.at / 2), folder / "earlier")


def _try(fault: Fault, folder: Path) -> dict:
    events = folder / "events"
    events.mkdir(parents=True)
    moment = f"{fault.moment}:{fault.count}:{fault.rank}"
    starts = 0
    while not finished(folder):
        starts += 1
        if starts > STARTS:
            raise Failed(f"not finished after {STARTS} starts: {ends_of_logs(folder)}")
        with torchruns(folder, starts, fault.agents, fault.ranks, moment) as agents:
            if starts == 1:
                send_signal(fault, events, agents)
            wait_for_end(agents, folder)
        check_no_orphans(events)
        check_reason(logs(folder, starts))
    return {**asdict(fault), "killed": True, "launches": starts, **check_result(folder)}


@cache
def uninterrupted(ranks: int) -> str:
    """The hash of the weights of a run that nothing has stopped."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "events").mkdir()
        with torchruns(folder, 1, 1, ranks, "never") as agents:
            wait_for_end(agents, folder)
        if not finished(folder):
            raise Failed(ends_of_logs(folder))
        return hash_of(newest(folder)[0])


@contextlib.contextmanager
def torchruns(
    folder: Path, start: int, agents: int, ranks: int, moment: str
) -> Iterator[list[subprocess.Popen]]:
    """The torchruns of one start; whatever happens, none is left at the end."""
    data_file = write_digits(folder / "small.npz", IMAGES, 7)
    flags = ("--data", data_file, "--out", folder / "out", "--batch-size", BATCH)
    flags += ("--epochs", EPOCHS, "--save-every", SAVE_EVERY, "--lr", LR, "--seed", SEED)
    flags += ("--timeout", 20)
    launch = [warm.torchrun(), f"--nproc-per-node={ranks // agents}", "--max-restarts=3"]
    launch.append("--local-addr=127.0.0.1")
    (port,) = free_ports(1)
    environment = clean_environment(
        EVENTS=folder / "events", OMP_NUM_THREADS=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    )
    if start == 1:
        environment["FAULT"] = moment
    started = []
    try:
        for number in range(agents):
            rendezvous = ["--standalone"]
            if agents == 2:
                config = f"is_host={int(number == 0)},last_call_timeout=5"
                config += ",join_timeout=30,read_timeout=10"
                rendezvous = [
                    "--nnodes=1:2",
                    "--rdzv-backend=c10d",
                    f"--rdzv-endpoint=127.0.0.1:{port}",
                    f"--rdzv-id={folder.name}",
                    f"--rdzv-conf={config},keep_alive_interval=2,keep_alive_max_attempt=4",
                ]
            command = [str(part) for part in (*launch, *rendezvous, SCRIPT, *flags)]
            with open(folder / f"log-{start}-{number}", "w") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        env={**environment, "AGENT": str(number)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield started
    finally:
        for agent in started:
            if agent.poll() is None:
                agent.kill()
                agent.wait()


def logs(folder: Path, start: int | str = "*", last: int = 0) -> str:
    """What the torchruns have printed, in all starts or in one.

    last   of each output only this many characters at its end; 0 for all of it
    """
    paths = sorted(folder.glob(f"log-{start}-*"))
    return "\n".join(f"{path.name}:\n{path.read_text()[-last:]}" for path in paths)


def ends_of_logs(folder: Path) -> str:
    """The ends of all outputs, for the message of a failure."""
    return logs(folder, last=4000)


def send_signal(fault: Fault, events: Path, agents: list[subprocess.Popen]) -> None:
    """Wait for the moment, and send the signal. Raises Failed if no process gets it,
    TooLate if all have ended.
    """
    deadline = time.monotonic() + LIMIT
    moment = time.monotonic() + fault.at if fault.moment == "any time" else deadline
    marker = events / "marker"
    while time.monotonic() < deadline and any(agent.poll() is None for agent in agents):
        if marker.exists() or time.monotonic() >= moment:
            target = _target(fault, events, agents)
            # A process that ends in this moment is not the one: the next try finds another.
            with contextlib.suppress(ProcessLookupError):
                if target is not None and alive(target):
                    os.kill(target, getattr(signal, fault.signal))
                    return
        time.sleep(0.01)
    kind = Failed if any(agent.poll() is None for agent in agents) else TooLate
    raise kind(f"the signal reached no process: {ends_of_logs(events.parent)}")


def _target(fault: Fault, events: Path, agents: list[subprocess.Popen]) -> int | None:
    """The process that gets the signal; None if it is not known yet."""
    started = processes(events)
    if not started and fault.moment == "any time":
        # No rank has been started: torchrun itself is all that there is.
        return agents[-1].pid if fault.target == "agent" else agents[0].pid
    running = [row for row in started if alive(row[0])]
    if fault.target == "host":
        # The other torchrun may have begun alone. The host is known when it has a rank.
        return next((agent for _, agent, _, number in running if number == 0), None)
    by_rank = {rank: (worker, agent) for worker, agent, rank, _ in running}
    if not by_rank:
        return None
    marker = events / "marker"
    at = json.loads(marker.read_text()) if marker.exists() else {}
    if at and not fault.neighbour and alive(at["worker"]):
        return at[fault.target]
    rank = min(fault.rank, max(by_rank))
    if fault.neighbour:
        rank = (rank + 1) % (max(by_rank) + 1)
    worker, agent = by_rank.get(rank, running[-1][:2])
    return worker if fault.target == "worker" else agent


def processes(events: Path) -> list[tuple[int, ...]]:
    """(process, its torchrun, rank, the torchrun's number) of all ranks that have started."""
    path = events / "processes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines]


def wait_for_end(agents: list[subprocess.Popen], folder: Path) -> None:
    """Wait until all torchruns have ended. Raises Failed after LIMIT seconds."""
    deadline = time.monotonic() + LIMIT
    for agent in agents:
        try:
            agent.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            text = ends_of_logs(folder)
            raise Failed(f"a torchrun hangs for {LIMIT:.0f} s: {text}") from None


def check_no_orphans(events: Path) -> None:
    """All ranks end within 10 s of their torchrun. Raises Failed."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [row for row in processes(events) if alive(row[0])]
        if not left:
            return
        time.sleep(0.05)
    raise Failed(f"ranks that have no torchrun still run: {left}")


def check_reason(text: str) -> None:
    """No rank of this start ended by an error in lesson 12's code. Raises Failed.

    text   all that the torchruns of the start have printed
    """
    if own := OWN_LINE.search(text):
        around = text[max(0, own.start() - 2000) : own.end() + 2000]
        raise Failed(f"a rank ended by an error in lesson 12's code: {around}")


def finished(folder: Path) -> bool:
    return (folder / "out" / "metrics.json").exists()


def newest(folder: Path) -> tuple[CNN, dict]:
    """The trained model and the position of the newest checkpoint."""
    _, content = elastic.CheckpointFolder(folder / "out" / "checkpoints").newest()
    model = new_model()
    model.load_state_dict(content["parts"]["model"])
    return model, content["position"]


def hash_of(model: CNN) -> str:
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()[:16]


def check_result(folder: Path) -> dict:
    """The weights are right, and each image counted once in each epoch. Raises Failed."""
    model, position = newest(folder)
    curve = position["curve"]
    if len(curve) != STEPS or position["epoch"] != EPOCHS:
        raise Failed(f"{len(curve)} steps instead of {STEPS}")
    difference = proof.difference(model, serial_model(folder / "small.npz"))
    if not difference <= 1e-5:
        raise Failed(f"the weights are {difference:.1e} away from one process's")
    sizes = sorted({size for _, size, _ in curve})
    if len(sizes) == 1 and hash_of(model) != uninterrupted(sizes[0]):
        raise Failed(f"other bits than {sizes[0]} ranks that nothing has stopped")
    _check_rows(curve, folder / "events", IMAGES)
    names = sorted(path.name for path in (folder / "out" / "checkpoints").iterdir())
    if [name[:4] for name in names] != ["lock", "step", "step"]:
        raise Failed(f"files are left: {names}")
    return {"sizes": sizes, "difference": difference}


def _check_rows(curve: list, events: Path, images: int) -> None:
    """Each epoch's steps, in the starts whose work was kept, have each image once."""
    seen: dict[tuple[int, int], list[int]] = {}
    for path in events.glob("rows-*.jsonl"):
        for line in path.read_text().splitlines():
            start, step, rows = json.loads(line)
            seen.setdefault((start, step), []).extend(rows)
    per_epoch = math.ceil(images / BATCH)
    for epoch in range(EPOCHS):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        rows = [row for step in steps for row in seen.get((curve[step][2], step), [])]
        if sorted(rows) != list(range(images)):
            raise Failed(f"epoch {epoch}: images lost or repeated, {sorted(rows)}")


def new_model() -> CNN:
    torch.manual_seed(SEED)
    return CNN()


def serial_model(path: Path) -> CNN:
    """The weights after training in one process."""
    train, _ = data.load(path)
    return proof.train_serially(
        new_model(), train, epochs=EPOCHS, batch_size=BATCH, lr=LR, seed=SEED
    )
