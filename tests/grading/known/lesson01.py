"""Known answers to the exercises of lesson 01."""

from known import Known, changed


def guesses(forward: float, backward: float) -> str:
    return f"# answer: guess_forward\nguess_forward = {forward}\nguess_backward = {backward}\n"


TIMING = """# answer: timing
from itertools import pairwise
from statistics import mean, median

def plan(parts, warm_up, steps):
    words = ["synchronize", "read"]
    for _ in range(warm_up + steps):
        for part in parts:
            words += [part, "synchronize", "read"]
    return words

def part_ms(parts, warm_up, steps, readings):
    durations = [after - before for before, after in pairwise(readings)]
    counted = durations[warm_up * len(parts):]
    return {part: median(counted[i::len(parts)]) for i, part in enumerate(parts)}
"""
ALL_TIMING = (
    "one step",
    "slow steps at the beginning",
    "another program",
    "a queue that is not empty",
    "other parts",
)

AMDAHL = """# answer: amdahl
def amdahl(parts, n, workers=0):
    shared = parts["forward"] + parts["backward"]
    gpus = shared / n + parts["update"]
    if workers:
        step = max(parts["data"] / workers, gpus)
    else:
        step = parts["data"] + gpus
    return sum(parts.values()) / step

def gpus_needed(parts, times):
    n = 1
    while n <= 10_000:
        if amdahl(parts, n) >= times:
            return n
        n += 1
    return None
"""
ALL_AMDAHL = (
    "two GPUs",
    "two GPUs and two workers",
    "how many GPUs",
    "other numbers",
)

TRAIN = """# answer: train
class Scale(nn.Module):
    def __init__(self, mean, deviation):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, rows):
        return (rows - self.mean) / self.deviation

def train(model, batches, device):
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for rows, labels in batches:
        rows, labels = rows.to(device), labels.to(device)
        loss = F.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""
BUFFERS = """        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
"""
ALL_TRAIN = ("the losses", "the device", "another GPU")


KNOWN = [
    # ---- guess_forward ------------------------------------------------------------------
    Known(
        "the clock shows forward's own time",
        "guess_forward",
        guesses(20, 0),
        ("forward",),
    ),
    Known("nothing waits", "guess_forward", guesses(0, 0), ("forward",)),
    Known(
        "the clock shows backward's own time",
        "guess_forward",
        guesses(70, 40),
        ("backward",),
    ),
    # ---- timing -------------------------------------------------------------------------
    Known("no synchronize", "timing", changed(TIMING, (', "synchronize"', "")), ALL_TIMING),
    Known(
        "synchronize after each step only",
        "timing",
        changed(
            TIMING,
            (
                '[part, "synchronize", "read"]',
                '[part, "synchronize", "read"] if part == parts[-1] else [part, "read"]',
            ),
        ),
        ALL_TIMING,
    ),
    Known(
        "warm-up counted",
        "timing",
        changed(TIMING, ("durations[warm_up * len(parts):]", "durations")),
        ("slow steps at the beginning",),
    ),
    Known(
        "one step of warm-up left out",
        "timing",
        changed(TIMING, ("durations[warm_up * len(parts):]", "durations[len(parts):]")),
        ("one step", "slow steps at the beginning", "a queue that is not empty"),
    ),
    Known("mean", "timing", changed(TIMING, ("median(c", "mean(c")), ("another program",)),
    Known("minimum", "timing", changed(TIMING, ("median(c", "min(c"))),
    Known(
        "the first reading does not wait",
        "timing",
        changed(TIMING, ('words = ["synchronize", "read"]', 'words = ["read"]')),
        ("a queue that is not empty",),
    ),
    Known(
        "three parts of these names",
        "timing",
        changed(
            TIMING,
            (
                "    return {part: median(counted[i::len(parts)]) for i, part in "
                "enumerate(parts)}",
                '    names = ["forward", "backward", "update"]\n'
                "    return {part: median(counted[i::3]) for i, part in enumerate(names)}",
            ),
        ),
        ("other parts",),
    ),
    Known(
        "the plan ends too early",
        "timing",
        changed(TIMING, ("range(warm_up + steps)", "range(steps)")),
        ("slow steps at the beginning", "another program", "other parts"),
    ),
    Known(
        "two readings for each part",
        "timing",
        """# answer: timing
import torch

def plan(names, before, count):
    once = [word for name in names for word in ("synchronize", "read", name)]
    words = []
    for step in range(before + count):
        for name in names:
            words.extend(["synchronize", "read", name, "synchronize", "read"])
    return words

def part_ms(names, before, count, clock):
    table = torch.tensor(clock, dtype=torch.float64).view(before + count, len(names), 2)
    ordinary = table.diff(dim=2)[before:, :, 0].median(dim=0).values
    return dict(zip(names, ordinary.tolist()))
""",
    ),
    # ---- amdahl -------------------------------------------------------------------------
    Known(
        "the update divided by n",
        "amdahl",
        changed(AMDAHL, ('shared / n + parts["update"]', '(shared + parts["update"]) / n')),
        ("two GPUs", "how many GPUs", "other numbers", "no number is enough"),
    ),
    Known(
        "workers read, and then the GPUs work",
        "amdahl",
        changed(
            AMDAHL,
            ('max(parts["data"] / workers, gpus)', 'parts["data"] / workers + gpus'),
        ),
        ("two GPUs and two workers", "other numbers"),
    ),
    Known(
        "reading always takes longer than the GPUs",
        "amdahl",
        changed(AMDAHL, ('max(parts["data"] / workers, gpus)', 'parts["data"] / workers')),
        ("other numbers",),
    ),
    Known(
        "seconds for times",
        "amdahl",
        changed(AMDAHL, ("return sum(parts.values()) / step", "return step")),
        (*ALL_AMDAHL, "no number is enough"),
    ),
    Known(
        "one GPU too many",
        "amdahl",
        changed(AMDAHL, (">= times:", "> times:"), ("return n\n", "return n + 1\n")),
        ("how many GPUs", "no number is enough"),
    ),
    Known(
        "a formula that is not rounded up",
        "amdahl",
        changed(
            AMDAHL,
            (
                "    n = 1\n",
                '    left = sum(parts.values()) / times - parts["data"] - parts["update"]\n'
                "    if left <= 0:\n        return None\n"
                '    return int((parts["forward"] + parts["backward"]) / left)\n    n = 1\n',
            ),
        ),
        ("how many GPUs",),
    ),
    Known(
        "a search without end",
        "amdahl",
        changed(AMDAHL, ("while n <= 10_000:", "while True:")),
        ("no number is enough",),
    ),
    Known(
        "the limit counts as reached",
        "amdahl",
        changed(
            AMDAHL,
            (
                "    n = 1\n",
                "    import math\n"
                '    left = sum(parts.values()) / times - parts["data"] - parts["update"]\n'
                "    if left < 0:\n        return None\n"
                '    shared = parts["forward"] + parts["backward"]\n'
                "    return math.ceil(shared / max(left, 1e-9))\n    n = 1\n",
            ),
        ),
        ("no number is enough",),
    ),
    Known(
        "solved for n",
        "amdahl",
        """# answer: amdahl
from math import ceil

def amdahl(parts, n, workers=0):
    whole = parts["data"] + parts["forward"] + parts["backward"] + parts["update"]
    busy = parts["update"] + (parts["forward"] + parts["backward"]) / n
    reading = parts["data"] / (workers or 1)
    return whole / (max(reading, busy) if workers else reading + busy)

def gpus_needed(parts, times):
    s = (parts["data"] + parts["update"]) / sum(parts.values())
    left = 1 / times - s
    return ceil((1 - s) / left) if left > 1e-12 else None
""",
    ),
    # ---- train --------------------------------------------------------------------------
    Known(
        "the mean stays on the CPU",
        "train",
        changed(
            TRAIN, (BUFFERS, "        self.mean = mean\n        self.deviation = deviation\n")
        ),
        ALL_TRAIN,
    ),
    Known(
        "all on the CPU",
        "train",
        changed(TRAIN, ("    model = model", '    device = "cpu"\n    model = model')),
        ("the device", "another GPU"),
    ),
    Known(
        "the loss on the CPU",
        "train",
        changed(
            TRAIN,
            (
                "F.cross_entropy(model(rows), labels)",
                "F.cross_entropy(model(rows).cpu(), labels.cpu())",
            ),
        ),
    ),
    Known(
        "always the first GPU",
        "train",
        changed(
            TRAIN, ("    model = model", "    device = virtual_gpus()[0]\n    model = model")
        ),
        ("another GPU",),
    ),
    Known(
        "the mean is trained",
        "train",
        changed(
            TRAIN,
            (
                BUFFERS,
                "        self.mean = nn.Parameter(mean)\n"
                "        self.deviation = nn.Parameter(deviation)\n",
            ),
        ),
        ("the losses",),
    ),
]
