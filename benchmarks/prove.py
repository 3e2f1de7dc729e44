"""What `multigpu prove` costs, and how often it is wrong: `benchmarks/prove.py [PROOFS]`.

Writes benchmarks/prove.json, under "costs" and "false_alarms"; tests/prove/public/run.py and
tests/prove/outside.py write the rest.

costs         a small GPT's step on the CPU with the recorder and without it, each in a process
              of its own, in turn; their peak memory; lesson 05's whole proof
false_alarms  PROOFS (100) proofs of right programs, each with another seed
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from multigpu import prove
from multigpu.files import write_json
from multigpu.prove import processes
from multigpu.prove.processes import SITE
from multigpu.prove.settings import VARIABLE, Settings

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "prove.json"
REPEATS = 5
STEPS = 25
# A GPT of 10.9 million parameters; a step has 8 sequences of 128 tokens.
GPT = """
import resource, statistics, time, torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, BATCH, WORDS, STEPS = 384, 6, 128, 8, 256, 25


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        parts = self.heads(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


model = nn.Sequential(
    nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, WORDS)
)
optimizer = torch.optim.AdamW(model.parameters())
seconds = []
for _ in range(STEPS):
    words = torch.randint(WORDS, (BATCH, LENGTH + 1))
    began = time.perf_counter()
    logits = model(words[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(logits, words[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
parameters = sum(p.numel() for p in model.parameters())
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(statistics.median(seconds[3:]), memory, parameters)
"""


def main() -> None:
    proofs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    _update("costs", costs())
    _update("false_alarms", false_alarms(proofs))


def _update(key: str, value: dict) -> None:
    """Replace one entry of the report; others are written by other programs."""
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    write_json(REPORT, report | {key: value})
    print(key, json.dumps(value))


def costs() -> dict:
    """The ratios, pair by pair, and the seconds of lesson 05's proof."""
    pairs = [(_step(recorded=True), _step(recorded=False)) for _ in range(REPEATS)]
    times = sorted(one[0] / other[0] for one, other in pairs)
    memory = sorted(one[1] / other[1] for one, other in pairs)
    script = ROOT / "lessons" / "05-ddp-cluster" / "ddp.py"
    with tempfile.TemporaryDirectory() as folder:
        command = ["torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        began = time.monotonic()
        proof = prove.run([*command, str(script), f"{folder}/weights.pt"], steps=20)
        seconds = time.monotonic() - began
    return {
        "parameters": pairs[0][0][2],
        "step": {"median": statistics.median(times), "ratios": times},
        "memory": {"median": statistics.median(memory), "ratios": memory},
        "lesson05": {"seconds": round(seconds, 1), "line": proof.line},
    }


def _step(recorded: bool) -> tuple[float, float, int]:
    """(seconds of a step, peak MiB, parameters) of the GPT in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if recorded:
            # One step more than there are: the program ends by itself, and prints.
            wishes = Settings(folder, steps=STEPS + 1)
            environment |= {VARIABLE: wishes.to_json(), "PYTHONPATH": str(SITE)}
        done = subprocess.run(
            [sys.executable, "-c", GPT], env=environment, check=True, text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
    seconds, memory, parameters = done.stdout.split()
    return float(seconds), float(memory), int(parameters)


def false_alarms(count: int) -> dict:
    """Prove right programs with other seeds; list what does not hold."""
    sys.path[:0] = [str(ROOT / "tests" / "prove"), str(ROOT / "tests" / "support")]
    import warm
    from wrong_cases import FAULTS, TORCHRUN

    # Forks of a process that has imported torch start in milliseconds.
    sys.executable = str(warm.python())
    processes.SAME_IN_EACH_RUN.clear()
    right = [fault for fault in FAULTS if fault.kind == "holds"]
    generator = random.Random(0)
    not_holds = []
    for number in range(count):
        case, seed = right[number % len(right)], generator.randrange(10_000)
        text = re.sub(r"manual_seed\((\d+)\)", rf"manual_seed({seed} + \1)", case.source())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "program.py")
            path.write_text(text)
            proof = prove.run([*TORCHRUN, f"--nproc-per-node={case.ranks}", str(path)])
        print(f"{case.name:<32} seed {seed:>5}  {proof.line}", flush=True)
        if proof.verdict != "holds":
            not_holds.append({"name": case.name, "seed": seed, "line": proof.line})
    alarms = [row for row in not_holds if "nothing can be said" not in row["line"]]
    return {"proofs": count, "fails": len(alarms), "not_holds": not_holds}


if __name__ == "__main__":
    main()
