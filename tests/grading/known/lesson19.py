"""Known answers to the exercises of lesson 19."""

from known import Known, changed, solved

LESSON = "19-context-experts"
BALANCE, DROPPED, AVERAGE = (
    solved(LESSON, name) for name in ("balance", "dropped", "average")
)
PLACES, TIME, OTHER = "16 tokens on 2 ranks", "time in both orders", "other places"
ROW, UP, ROWS = "one row", "rounded up", "several rows"
TWO, SENT, THREE = "two ranks", "what is sent", "three ranks"

BY_ARRAYS = changed(
    BALANCE,
    (
        "work.append(sum(key <= query for query in queries for key in keys))",
        "pairs = torch.tensor(keys)[None] <= torch.tensor(queries)[:, None]\n"
        "            work.append(pairs.sum().item())",
    ),
)
PADDED = """# answer: dropped
def dropped(rows, experts, capacity):
    room = -int(-capacity * len(rows[0]) // experts)
    return [
        [place for place, expert in enumerate(row) if row[:place].count(expert) >= room]
        for row in rows
    ]
"""
ALL_REDUCED = """# answer: average
def average(shared, own):
    for gradient in [*shared, *own]:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
"""
TOGETHER = """# answer: average
def average(shared, own):
    ranks = dist.get_world_size()
    flat = torch.cat([gradient.flatten() for gradient in shared])
    dist.all_reduce(flat)
    parts = (flat / ranks).split([gradient.numel() for gradient in shared])
    for gradient, part in zip(shared, parts):
        gradient.copy_(part.view_as(gradient))
    for gradient in own:
        gradient.div_(ranks)
"""

KNOWN = [
    Known(
        "plain order",
        "balance",
        changed(
            BALANCE,
            (
                "early, late = rank * size, (2 * ranks - 1 - rank) * size",
                "early = 2 * rank * size",
            ),
            ("*range(late, late + size)", "*range(early + size, early + 2 * size)"),
        ),
        (PLACES, OTHER),
    ),
    Known(
        "the mean rank's time",
        "balance",
        changed(BALANCE, ("time += max(work)", "time += sum(work) / ranks")),
        (TIME, OTHER),
    ),
    Known(
        "the slowest rank's work in all",
        "balance",
        changed(
            BALANCE,
            ("ranks, time = len(held), 0", "ranks, total = len(held), [0] * len(held)"),
            ("time += max(work)", "total = [a + b for a, b in zip(total, work)]"),
            ("return time", "return max(total)"),
        ),
        (OTHER,),
    ),
    Known(
        "made for rising places",
        "balance",
        changed(
            BALANCE, ("key <= query for", "key <= query or queries != sorted(queries) for")
        ),
        (OTHER,),
    ),
    Known("counted by a comparison of arrays", "balance", BY_ARRAYS),
    Known(
        "rounded down",
        "dropped",
        changed(DROPPED, ("math.ceil(", "math.floor(")),
        (UP,),
    ),
    Known(
        "one room for all rows",
        "dropped",
        changed(
            DROPPED,
            ("    found = []\n", "    found, taken = [], [0] * experts\n"),
            (
                "room, taken = math.ceil(capacity * len(row) / experts), [0] * experts",
                "room = math.ceil(capacity * len(row) / experts)",
            ),
        ),
        (ROWS,),
    ),
    Known(
        "the last ones find room",
        "dropped",
        changed(
            DROPPED,
            ("in enumerate(row):", "in reversed(list(enumerate(row))):"),
        ),
        (ROW, UP, ROWS),
    ),
    Known("counts those before", "dropped", PADDED),
    Known(
        "the slowest rank's work, and no expert full",
        "guess_ring",
        "# answer: guess_ring\nguess_plain = 4\nguess_zigzag = 1.75\nguess_dropped = 12.5\n",
        ("plain order", "zig-zag order", "dropped"),
    ),
    Known("all are reduced", "average", ALL_REDUCED, (TWO, SENT, THREE)),
    Known(
        "the experts' sums",
        "average",
        changed(AVERAGE, ("    for gradient in own:\n        gradient /= ranks\n", "")),
        (TWO, THREE),
    ),
    Known(
        "made for two ranks",
        "average",
        changed(AVERAGE, ("ranks = dist.get_world_size()", "ranks = 2")),
        (THREE,),
    ),
    Known("shared ones in one all-reduce", "average", TOGETHER),
]
