"""Known answers to the exercises of lesson 19."""

from known import Known, changed, solved

LESSON = "19-context-experts"
BALANCE, DROPPED, MERGE, AVERAGE = (
    solved(LESSON, name) for name in ("balance", "dropped", "merge", "average")
)
PLACES, TIME, OTHER = "16 tokens on 2 ranks", "time in both orders", "other places"
ROW, UP, ROWS = "one row", "rounded up", "several rows"
TWO_PARTS, LARGE, MORE = "two parts", "large scores", "more parts"
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
ONE_BY_ONE = """# answer: merge
def merge(parts):
    out, lse = parts[0]
    for other, other_lse in parts[1:]:
        total = torch.logaddexp(lse, other_lse)
        out = out * (lse - total).exp()[:, None] + other * (other_lse - total).exp()[:, None]
        lse = total
    return [out, lse]
"""
WITHOUT_LOGARITHM = """# answer: merge
def merge(parts):
    sums = [lse.exp() for _, lse in parts]
    out = sum(out * weight[:, None] for (out, _), weight in zip(parts, sums))
    return [out / sum(sums)[:, None], sum(sums).log()]
"""
FIRST_TWO = """# answer: merge
def merge(parts):
    (one, one_lse), (other, other_lse) = parts[:2]
    lse = torch.logaddexp(one_lse, other_lse)
    weights = (one_lse - lse).exp()[:, None], (other_lse - lse).exp()[:, None]
    return [one * weights[0] + other * weights[1], lse]
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
        "made for four ranks in rising places",
        "balance",
        changed(BALANCE, ("key <= query for", "key <= query or ranks == 3 or ranks == 5 for")),
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
        "adds the outputs",
        "merge",
        changed(MERGE, ("out * (part_lse - lse).exp()[:, None]", "out")),
        (TWO_PARTS, LARGE, MORE),
    ),
    Known("without the logarithm", "merge", WITHOUT_LOGARITHM, (LARGE,)),
    Known("the first two", "merge", FIRST_TWO, (MORE,)),
    Known("one after the other", "merge", ONE_BY_ONE),
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
