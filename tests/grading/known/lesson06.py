"""Lesson 06: answers with known scores."""

from known import Known

NODES = "four nodes"
RANKS, OTHER_RANKS = "4 ranks, 2 stages", "other numbers"
TWO, OTHER = "two stages", "other numbers"
STAGES, WHERE = "one stage or two", "inside or across"
MODELS, FULLEST, NOTHING = "other models and networks", "unequal stages", "nothing fits"


def groups(pipelines: str, twins: str) -> str:
    """An answer that returns these two lists."""
    return f"# answer: groups\ndef groups(n, p):\n    return {pipelines}, {twins}\n"


PIPELINES = "[list(range(i, i + p)) for i in range(0, n, p)]"
TWINS = "[list(range(s, n, p)) for s in range(p)]"

# Another algorithm: a grid of ranks, its rows and its columns.
GRID = """# answer: groups
import torch


def groups(ranks, stages):
    grid = torch.arange(ranks).reshape(-1, stages)
    return grid.tolist(), grid.T.tolist()
"""


def devices(first: str) -> str:
    """An answer that takes GPUs from `first` on."""
    return (
        "# answer: devices_of\ndef devices_of(local_rank, stages):\n"
        f"    return ['cuda:%d' % gpu for gpu in range({first}, {first} + stages)]\n"
    )


def layout(
    one: str = "4 * sum(weights) + sum(activations) / 4 <= memory",
    fits: str = "max(first, second) <= memory",
    cuts: str = "range(1, n)",
    received: str = "sent",
    nothing: str = "None",
    score: str = "seconds",
    plans: str = "[([[0, 1], [2, 3]], inside), ([[0, 2], [1, 3]], across)]",
) -> str:
    """The plans that fit, sorted; each argument is a part that can be wrong."""
    return f"""# answer: layout
def layout(weights, activations, memory, links):
    n = len(weights)
    if {one}:
        return [[0], [1], [2], [3]], None
    found = []
    for cut in {cuts}:
        before, after = sum(weights[:cut]), sum(weights[cut:])
        sent = activations[cut - 1]
        first = 4 * before + sum(activations[:cut]) / 2
        second = 4 * after + (sum(activations[cut:]) + {received}) / 2
        inside = sent / links[0] + 2 * max(before, after) / links[1]
        across = 2 * sent / links[1] + max(before, after) / links[0]
        for gpus, seconds in {plans}:
            if {fits}:
                found.append(({score}, gpus, cut))
    if not found:
        return {nothing}
    _, gpus, cut = min(found)
    return gpus, cut
"""


INSIDE = "[([[0, 1], [2, 3]], inside)]"
ACROSS = "[([[0, 2], [1, 3]], across)]"

KNOWN = [
    # ---- guess_allreduce
    Known("5.4", "guess_allreduce", "# answer: guess_allreduce\nguess_allreduce = 5.4"),
    Known(
        "as with two nodes",
        "guess_allreduce",
        "# answer: guess_allreduce\nguess_allreduce = 3.6",
        (NODES,),
    ),
    Known(
        "an adapter per GPU",
        "guess_allreduce",
        "# answer: guess_allreduce\nguess_allreduce = 1.5 * 4 * 0.564 / 1.25",
        (NODES,),
    ),
    # ---- groups
    Known("rows and columns of a grid", "groups", GRID),
    Known("neighbours for twins", "groups", groups(TWINS, PIPELINES), (RANKS, OTHER_RANKS)),
    Known(
        "all ranks average",
        "groups",
        groups(PIPELINES, "[list(range(n))]"),
        (RANKS, OTHER_RANKS),
    ),
    Known(
        "only the groups of rank 0",
        "groups",
        groups("[list(range(p))]", "[list(range(0, n, p))]"),
        (RANKS, OTHER_RANKS),
    ),
    Known(
        "two replicas only",
        "groups",
        groups("[list(range(p)), list(range(p, 2 * p))]", "[[s, s + p] for s in range(p)]"),
        (OTHER_RANKS,),
    ),
    # ---- devices_of
    Known(
        "names in a list",
        "devices_of",
        "# answer: devices_of\ndef devices_of(local_rank, stages):\n    names = []\n"
        "    while len(names) < stages:\n"
        "        names.append('cuda:' + str(len(names) + stages * local_rank))\n"
        "    return names\n",
    ),
    Known("as it was", "devices_of", devices("local_rank"), (TWO, OTHER)),
    Known("two stages only", "devices_of", devices("2 * local_rank"), (OTHER,)),
    # ---- layout
    Known("sorted plans", "layout", layout()),
    Known(
        "the fullest GPU ignored",
        "layout",
        layout(fits="(first + second) / 2 <= memory"),
        (FULLEST,),
    ),
    Known("what is received forgotten", "layout", layout(received="0"), (FULLEST,)),
    Known("always inside", "layout", layout(plans=INSIDE), (WHERE, MODELS)),
    Known("always across", "layout", layout(plans=ACROSS), (STAGES, WHERE, MODELS, FULLEST)),
    Known(
        "always two stages",
        "layout",
        layout(one="False"),
        (STAGES,),
    ),
    Known(
        "always four replicas",
        "layout",
        layout(one="True"),
        (STAGES, WHERE, MODELS, FULLEST, NOTHING),
    ),
    Known("the middle cut", "layout", layout(cuts="[n // 2]"), (MODELS,)),
    Known("the smallest message", "layout", layout(score="(sent, seconds)"), (MODELS,)),
    Known(
        "something always fits",
        "layout",
        layout(nothing="([[0, 1], [2, 3]], n // 2)"),
        (NOTHING,),
    ),
]
