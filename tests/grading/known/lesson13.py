"""Known answers to lesson 13's exercises: see tests/support/known.py."""

from known import Known, broken, changed, solved

FOUR_BUCKETS = ("four buckets",)
GUESS = "# answer: guess_efficiency\nguess_efficiency = "

GUESSES = [
    Known("guess: rounded", "guess_efficiency", GUESS + "68"),
    Known("guess: nothing hides", "guess_efficiency", GUESS + "100 * 64 / 124", FOUR_BUCKETS),
    Known("guess: a fraction", "guess_efficiency", GUESS + "64 / 94", FOUR_BUCKETS),
]

# ---- efficiencies ---------------------------------------------------------------------------

STRONG = "strong scaling"
WEAK = "weak scaling"
OTHER_RUNS = "other runs"
EVERY_RUN = (STRONG, WEAK, OTHER_RUNS)

EFFICIENCIES = """# answer: efficiencies
def efficiencies(runs):
    runs = sorted(runs, key=lambda run: run["world_size"])
    rates = {}
    for run in runs:
        same = [r for r in runs if r["world_size"] == run["world_size"]]
        seconds = sorted(s for r in same for s in r["step_seconds"])
        rates[run["world_size"]] = run["batch_size"] / seconds[len(seconds) // 2]
    fewest = runs[0]["world_size"]
    return {n: rate / rates[fewest] * fewest / n for n, rate in rates.items()}
"""
MEAN = changed(EFFICIENCIES, ("seconds[len(seconds) // 2]", "(sum(seconds) / len(seconds))"))
FROM_SECONDS = changed(EFFICIENCIES, ('run["batch_size"] / ', "1 / "))
PER_RANK_BATCH = changed(EFFICIENCIES, ('run["batch_size"] / ', "run['world_size'] / "))
SPEED_UPS = changed(EFFICIENCIES, (" * fewest / n", ""))
ONE_RANK = changed(EFFICIENCIES, ('runs[0]["world_size"]', "1"))
BASE_OF_ONE = changed(EFFICIENCIES, (" * fewest / n", " / n"))
FIRST_RUN = changed(
    EFFICIENCIES,
    ('runs = sorted(runs, key=lambda run: run["world_size"])\n    ', ""),
)

RUNS = [
    Known("runs: sorted first", "efficiencies", EFFICIENCIES),
    Known("runs: the mean", "efficiencies", MEAN, EVERY_RUN),
    Known("runs: seconds alone", "efficiencies", FROM_SECONDS, (WEAK, OTHER_RUNS)),
    Known("runs: a batch for each rank", "efficiencies", PER_RANK_BATCH, (STRONG, OTHER_RUNS)),
    Known("runs: speed-ups", "efficiencies", SPEED_UPS, EVERY_RUN),
    Known("runs: the base has one rank", "efficiencies", ONE_RANK, (OTHER_RUNS,)),
    Known("runs: divided by all ranks", "efficiencies", BASE_OF_ONE, (OTHER_RUNS,)),
    Known("runs: the base is the first run", "efficiencies", FIRST_RUN, (OTHER_RUNS,)),
]

# ---- weak_scaling ---------------------------------------------------------------------------

ONE = "one GPU"
EIGHT = "1, 2 and 8 GPUs"
OTHER_CLUSTERS = "other clusters"
EVERY_CLUSTER = (ONE, EIGHT, OTHER_CLUSTERS)

# The median of steps that are waited for one by one.
WEAK_SCALING = """# answer: weak_scaling
def weak_scaling(clusters, images, steps):
    seconds = {}
    for gpus, cluster in clusters.items():
        ends = []
        for _ in range(cluster.warm_up + steps):
            cluster.step(images)
            cluster.synchronize()
            ends.append(cluster.now())
        ends = ends[cluster.warm_up - 1 :]
        seconds[gpus] = statistics.median(b - a for a, b in zip(ends, ends[1:]))
    return {n: (n * images / each, seconds[1] / each) for n, each in seconds.items()}
"""
BROKEN = broken("13", "weak_scaling")
MENDED = solved("13", "weak_scaling")
NO_WAIT_AT_THE_END = changed(
    MENDED,
    ("        cluster.synchronize()\n        seconds", "        seconds"),
)
NO_WAIT_BEFORE = changed(
    MENDED,
    ("        cluster.synchronize()\n        began", "        began"),
)
WARM_UP_OF_2 = changed(MENDED, ("range(cluster.warm_up)", "range(2)"))
WARM_UP_OF_3 = changed(MENDED, ("range(cluster.warm_up)", "range(3)"))
LONG_WARM_UP = changed(MENDED, ("range(cluster.warm_up)", "range(50)"))
STRONG_SCALING = changed(
    MENDED,
    (
        "range(steps):\n            cluster.step(images)",
        "range(steps):\n            cluster.step(images // gpus)",
    ),
    ("gpus * images / seconds", "images / seconds"),
)
FIRST_BASE = changed(
    MENDED, ("rate / rates[1] / gpus", "rate / list(rates.values())[0] / gpus")
)

CLUSTERS = [
    Known("clusters: the median step", "weak_scaling", WEAK_SCALING),
    Known("clusters: a long warm-up", "weak_scaling", LONG_WARM_UP),
    Known("clusters: the broken program", "weak_scaling", BROKEN, EVERY_CLUSTER),
    Known("clusters: no wait at the end", "weak_scaling", NO_WAIT_AT_THE_END, EVERY_CLUSTER),
    Known("clusters: no wait before", "weak_scaling", NO_WAIT_BEFORE, EVERY_CLUSTER),
    Known(
        "clusters: two steps warm up", "weak_scaling", WARM_UP_OF_2, (EIGHT, OTHER_CLUSTERS)
    ),
    Known("clusters: three steps warm up", "weak_scaling", WARM_UP_OF_3, (OTHER_CLUSTERS,)),
    Known("clusters: strong", "weak_scaling", STRONG_SCALING, (EIGHT, OTHER_CLUSTERS)),
    Known(
        "clusters: the first is the base", "weak_scaling", FIRST_BASE, (EIGHT, OTHER_CLUSTERS)
    ),
]

# ---- ask_for --------------------------------------------------------------------------------

FIT = "the fit"
FIRST = "the first result"
OTHER_TRAININGS = "other trainings"

ASK_FOR = """# answer: ask_for
def serial_share(speed_ups):
    top = bottom = 0.0
    for n, speed_up in speed_ups.items():
        top += (1 - 1 / n) * (1 / speed_up - 1 / n)
        bottom += (1 - 1 / n) ** 2
    return top / bottom

def ask_for(share, hours, queue, lowest):
    best = None
    for n, wait in queue.items():
        ratio = 1 / (share * n + 1 - share)
        if ratio < lowest:
            continue
        result = (wait + hours * (share + (1 - share) / n), n)
        if best is None or result < best:
            best = result
    return best[1] if best else None
"""
MEAN_OF_SHARES = changed(
    ASK_FOR,
    ("        top += (1 - 1 / n) * (1 / speed_up - 1 / n)\n", "        if n > 1:\n"
     "            top += (1 / speed_up - 1 / n) / (1 - 1 / n)\n"),
    ("        bottom += (1 - 1 / n) ** 2\n", "            bottom += 1\n"),
)  # fmt: skip
NEEDS_ONE = changed(ASK_FOR, ("    top = bottom", "    speed_ups[1]\n    top = bottom"))
NO_QUEUE = changed(ASK_FOR, ("(wait + hours", "(0 * wait + hours"))
LARGER = changed(
    ASK_FOR,
    ("* n + 1 - share)\n", "* n + 1 - share)\n        n = -n\n"),
    ("(share + (1 - share) / n), n)", "(share - (1 - share) / n), n)"),
    ("return best[1] if", "return -best[1] if"),
)
FEWEST_IF_NONE = changed(ASK_FOR, ("if best else None", "if best else min(queue)"))

TRAININGS = [
    Known("ask: a loop over the queue", "ask_for", ASK_FOR),
    Known("ask: the mean of shares", "ask_for", MEAN_OF_SHARES, (FIT,)),
    Known("ask: needs one GPU", "ask_for", NEEDS_ONE, (OTHER_TRAININGS,)),
    Known("ask: without the queue", "ask_for", NO_QUEUE, (FIRST, OTHER_TRAININGS)),
    Known("ask: of two the larger", "ask_for", LARGER, (OTHER_TRAININGS,)),
    Known("ask: none is the fewest", "ask_for", FEWEST_IF_NONE, (OTHER_TRAININGS,)),
]

KNOWN = [*GUESSES, *RUNS, *CLUSTERS, *TRAININGS]
