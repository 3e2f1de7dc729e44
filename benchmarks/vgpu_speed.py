"""Measure what virtual GPUs cost on this machine's CPU: `python benchmarks/vgpu_speed.py`.

1. A training step of the course's CNN at batch 256 on one virtual GPU ÷ the plain CPU step.
   Goal: at most 1.3.
2. The same of a small GPT: the sizes that nanoGPT's README gives for a laptop (4 layers, 4
   heads, 128 wide, 12 sequences of 64 characters), with AdamW. Goal: at most 1.5.
3. A shape-only training step of ResNet-50. Goal: under 2 s.
4. What `import multigpu` adds to `import torch`. Goal: at most 0.1 s.

The runs alternate, so a change of the machine's speed affects both equally. The two runs of 1
and 2 are in two processes, because control.start lets the allocator keep freed memory, which
would make a plain CPU step in the same process faster too. Another row has both runs in one
process: it shows the cost of the wrappers alone. Beside it is the same step with a tensor
subclass that only passes its operations on (forwarding.py): no virtual GPU whose tensors are a
subclass in Python can cost less. It writes benchmarks/vgpu_speed.json.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from alternating import seconds_in_turn, spread
from forwarding import wrap, wrap_parameters
from torch.nn.functional import cross_entropy

from multigpu.files import write_json
from multigpu.models import CNN
from multigpu.models.resnet import resnet
from multigpu.models.transformer import gpt
from multigpu.virtual import control

HERE = Path(__file__).parent
ROUNDS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdecimal() else 60


def cnn_step(device: torch.device, bare: bool = False) -> Callable[[], None]:
    """A training step of the CNN, ready to run.

    With `bare`, its tensors only pass the operations on to the CPU (forwarding.py).
    """
    torch.manual_seed(0)
    model = CNN()
    images = torch.randn(256, 1, 8, 8)
    labels = torch.randint(0, 10, (256,))
    if bare:
        model = wrap_parameters(model, device)
        images = wrap(images, device)
        labels = wrap(labels, device)
    else:
        model = model.to(device)
        images = images.to(device)
        labels = labels.to(device)
    # A virtual GPU's optimizer takes the foreach kernels by itself, as CUDA's does.
    foreach = True if bare else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return warmed_up(step)


def gpt_step(device: torch.device) -> Callable[[], None]:
    """A training step of the small GPT, ready to run."""
    torch.manual_seed(0)
    model = gpt(layers=4, hidden=128, heads=4, tokens=64, vocabulary=65).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 65, (12, 64)).to(device)
    targets = torch.randint(0, 65, (12, 64)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    return warmed_up(step)


def warmed_up(step: Callable[[], None]) -> Callable[[], None]:
    for _ in range(10):
        step()
    return step


# The steps that are measured, with the goals in two processes and in one.
STEPS = {
    "CNN step at batch 256": (cnn_step, "at most 1.3", "at most 1.25"),
    "small GPT step": (gpt_step, "at most 1.5", "at most 1.5"),
}


def seconds(run: Callable[[], object], times: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times


def serve(name: str, device: str, threads: int) -> None:
    """A process of `overhead`: for each line of stdin, print the mean time of three steps."""
    torch.set_num_threads(threads)
    on_cpu = device == "cpu"
    make, _, _ = STEPS[name]
    step = make(torch.device("cpu") if on_cpu else control.start(count=1)[0])
    for _ in sys.stdin:
        print(seconds(step, 3), flush=True)


def overhead(name: str, threads: int) -> dict:
    """Alternate three steps in a process without virtual GPUs and three in one with them."""
    command = [sys.executable, __file__, "serve", name]
    _, goal, _ = STEPS[name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [
        subprocess.Popen([*command, device, str(threads)], **pipes)
        for device in ("cpu", "vgpu")
    ]
    pairs = seconds_in_turn(workers, ROUNDS)
    return {
        "quantity": f"{name}, {threads} thread(s), one virtual GPU / plain CPU",
        "goal": goal,
        **spread(pairs),
        "cpu_ms": round(statistics.median(plain for plain, _ in pairs) * 1e3, 2),
        "vgpu_ms": round(statistics.median(virtual for _, virtual in pairs) * 1e3, 2),
    }


def within_one_process(name: str) -> dict:
    """The same in one process, where the plain step gains from the allocator too."""
    make, _, goal = STEPS[name]
    with control.running(count=1) as (device,):
        plain = make(torch.device("cpu"))
        virtual = make(device)
        ratios = sorted(1 / seconds(plain, 3) * seconds(virtual, 3) for _ in range(ROUNDS))
    what = f"{name} within one process, {torch.get_num_threads()} thread(s)"
    return {
        "quantity": what,
        "goal": goal,
        "median": round(statistics.median(ratios), 3),
        "rounds": ROUNDS,
    }


def least_cost() -> dict:
    """The CNN's step in one process, with tensors that only pass their operations on."""
    with control.running(count=1) as (device,):
        plain = cnn_step(torch.device("cpu"))
        forwarded = cnn_step(device, bare=True)
        ratios = [1 / seconds(plain, 3) * seconds(forwarded, 3) for _ in range(ROUNDS)]
    what = "CNN step within one process, a tensor subclass that only passes operations on"
    return {
        "quantity": f"{what}, {torch.get_num_threads()} thread(s)",
        "goal": "none: the least that a subclass can cost",
        "median": round(statistics.median(ratios), 3),
        "rounds": ROUNDS,
    }


def shape_only() -> dict:
    with control.running(count=1, compute=False) as (device,):
        model = resnet(50).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images = torch.empty(120, 3, 128, 128, device=device)
        labels = torch.empty(120, dtype=torch.long, device=device)

        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

        step()
        times = [seconds(step) for _ in range(5)]
    return {
        "quantity": "shape-only ResNet-50 step, seconds",
        "goal": "under 2",
        "median": round(statistics.median(times), 3),
    }


def importing() -> dict:
    """Measure `import multigpu` in new processes, after torch was imported."""
    code = (
        "import time, torch\n"
        "began = time.perf_counter()\n"
        "import multigpu\n"
        "print(time.perf_counter() - began)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5)]
    return {
        "quantity": "import multigpu after import torch, seconds",
        "goal": "at most 0.1",
        "median": round(statistics.median(times), 4),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        sys.exit()
    counts = sorted({1, torch.get_num_threads()})
    rows = [overhead(name, threads) for name in STEPS for threads in counts]
    rows += [within_one_process(name) for name in STEPS]
    rows += [least_cost(), shape_only(), importing()]
    for row in rows:
        print(f"{row['quantity']}: {row['median']} ({row['goal']})")
    write_json(HERE / "vgpu_speed.json", {"rows": rows})
