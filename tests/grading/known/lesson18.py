"""Known answers to the exercises of lesson 18."""

from known import Known

# patient → rank, line, cause
RIGHT = {
    "stopping": (1, 34, "stop"),
    "stages": (1, 31, "messages"),
    "shuffle": (1, 25, "seed"),
    "lengths": (1, 25, "share"),
}


def diagnoses(patient: str = "", rank: int = 0, line: int = 0, cause: str = "") -> str:
    """The answer's cell: right, but for what is given of one patient."""
    lines = ["# answer: guess_patients"]
    for name, found in RIGHT.items():
        given = (rank, line, cause) if name == patient else found
        for what, value in zip(("rank", "line", "cause"), given, strict=True):
            lines.append(f"guess_{name}_{what} = {value!r}")
    return "\n".join(lines)


KNOWN = []
for name, (rank, line, cause) in RIGHT.items():
    where = (f"{name}: rank and line",)
    KNOWN += [
        Known(f"{name}: 0", "guess_patients", diagnoses(name, 0, line, cause), where),
        Known(
            f"{name}: before", "guess_patients", diagnoses(name, rank, line - 2, cause), where
        ),
        Known(
            f"{name}: another cause",
            "guess_patients",
            diagnoses(name, rank, line, "network"),
            (f"{name}: cause",),
        ),
    ]

STOPS = """# answer: stops
def stops(loss, before):
    losses = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, torch.tensor([loss], dtype=torch.float64))
    mean = sum(one.item() for one in losses) / len(losses)
    return mean > before, mean
"""
ILL = """# answer: ill_ranks
def ill_ranks(loss):
    losses = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    return [rank for rank, one in enumerate(losses) if not torch.isfinite(one)]
"""
TWO, MORE = "two ranks", "other ranks"
NAN, OTHER = "one NaN", "other losses"


def changed(answer: str, old: str, new: str) -> str:
    """The answer with `old` replaced."""
    assert old in answer, old
    return answer.replace(old, new)


KNOWN += [
    Known("the condition", "guess_patients", diagnoses("stopping", 1, 33, "stop")),
    Known("all losses, gathered", "stops", STOPS),
    Known(
        "its own loss",
        "stops",
        "# answer: stops\ndef stops(loss, before):\n    return loss > before, loss\n",
        (TWO, MORE),
    ),
    Known(
        "if any rank's own loss rises",
        "stops",
        changed(
            STOPS, "sum(one.item() for one in losses) / len(losses)", "max(losses).item()"
        ),
        (TWO, MORE),
    ),
    Known("half of the sum", "stops", changed(STOPS, "len(losses)", "2"), (MORE,)),
    Known("each loss, gathered", "ill_ranks", ILL),
    Known(
        "rank 0's list alone",
        "ill_ranks",
        ILL + "found = ill_ranks\n\ndef ill_ranks(loss):\n"
        "    ranks = found(loss)\n    return ranks if dist.get_rank() == 0 else []\n",
        (NAN, OTHER),
    ),
    Known(
        "NaN alone", "ill_ranks", changed(ILL, "not torch.isfinite(", "torch.isnan("), (OTHER,)
    ),
]
