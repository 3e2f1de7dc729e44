"""Measure what `multigpu virtual` adds on this machine's CPU: `python benchmarks/virtual.py`.

1. The time of a script that imports torch, under the command − by itself. Goal: at most 0.5 s.
2. An operation on a small tensor, under the command ÷ on a plain virtual GPU. Goal: at most
   1.05.
3. The same for a training step of the course's CNN at batch 256. No goal.

The runs alternate, so a change of the machine's speed affects both equally. 1 has the CPU time
of all processes too, because a busy machine prolongs the time. 2 and 3 are CPU time, with one
thread for torch; that of the thread that writes the record counts. It writes
benchmarks/virtual.json.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from alternating import seconds_in_turn, spread
from torch.nn.functional import cross_entropy

from multigpu.files import write_json
from multigpu.models import CNN
from multigpu.virtual import control

HERE = Path(__file__).parent
ROUNDS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdecimal() else 40
STARTS = max(5, ROUNDS // 4)
VIRTUAL = [sys.executable, "-m", "multigpu.cli", "virtual", "--gpus=1"]


def operations(device: torch.device) -> Callable[[], None]:
    x = torch.ones(64, device=device)

    def run() -> None:
        for _ in range(500):
            x + 1

    return run


def step(device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    model = CNN().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(256, 1, 8, 8).to(device)
    labels = torch.randint(0, 10, (256,)).to(device)

    def run() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return run


def serve(device: str, what: str) -> None:
    """A process of `ratio`: for each line of stdin, print the seconds of a run."""
    torch.set_num_threads(1)
    place = torch.device("cuda") if device == "cuda" else control.start(count=1)[0]
    run = {"operation": operations, "step": step}[what](place)
    for _ in range(5):
        run()
    for _ in sys.stdin:
        began = time.process_time()
        run()
        print(time.process_time() - began, flush=True)


def ratio(what: str, quantity: str, goal: str) -> dict:
    """Alternate a run in a process under the command and in one without it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = [__file__, "serve"]
    commands = ([sys.executable, *server, "vgpu", what], [*VIRTUAL, *server, "cuda", what])
    workers = [
        subprocess.Popen(command, stderr=subprocess.DEVNULL, env=visible(), **pipes)
        for command in commands
    ]
    pairs = seconds_in_turn(workers, ROUNDS)
    return {
        "quantity": quantity,
        "goal": goal,
        **spread(pairs),
    }


def starting() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text("import torch\n")
        # Compiles the modules.
        times([*VIRTUAL, str(script)])
        pairs = [
            (times([sys.executable, str(script)]), times([*VIRTUAL, str(script)]))
            for _ in range(STARTS)
        ]
    return {
        "quantity": "start of a script that imports torch, under the command - by itself, s",
        "goal": "at most 0.5",
        "median": round(statistics.median(v[0] - p[0] for p, v in pairs), 3),
        "median_cpu": round(statistics.median(v[1] - p[1] for p, v in pairs), 3),
        "by_itself": round(statistics.median(p[0] for p, _ in pairs), 3),
        "rounds": STARTS,
    }


def times(command: list[str]) -> tuple[float, float]:
    """The seconds until a command has ended, and the CPU seconds of all its processes."""
    before = os.times()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=visible())
    after = os.times()
    cpu = after.children_user + after.children_system
    return (
        after.elapsed - before.elapsed,
        cpu - before.children_user - before.children_system,
    )


def visible() -> dict[str, str]:
    """This process's environment, in which a program sees all virtual GPUs.

    Python keeps the compiled modules, as it does by default and as pip does at the install:
    compiling this library would take longer than the rest of its start.
    """
    left_out = ("CUDA_VISIBLE_DEVICES", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in left_out}


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3])
        sys.exit()
    rows = [
        starting(),
        ratio("operation", "operation, under the command / plain virtual GPU", "at most 1.05"),
        ratio("step", "CNN step at batch 256, under the command / plain virtual GPU", "none"),
    ]
    for row in rows:
        print(f"{row['quantity']}: {row['median']} ({row['goal']})")
    write_json(HERE / "virtual.json", {"rows": rows})
