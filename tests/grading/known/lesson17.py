"""Known answers to the exercises of lesson 17."""

from known import Known, changed, solved

# By coordinates, without strides.
GROUPS = """# answer: groups
import itertools

def groups(rank, mesh):
    places = list(itertools.product(*(range(size) for size in mesh.values())))
    mine = places[rank]
    found = {}
    for dimension, name in enumerate(mesh):
        found[name] = [
            other
            for other, place in enumerate(places)
            if all(a == b for i, (a, b) in enumerate(zip(place, mine)) if i != dimension)
        ]
    return found
"""
EIGHT, OTHER = "eight ranks", "other meshes"

LAYOUT = solved("17", "layout")
FITS, NETWORKS, CLUSTERS = "fits", "two networks", "other clusters"

KNOWN = [
    Known(
        "all ranks of a block; copies divide what is kept",
        "guess_mesh",
        "# answer: guess_mesh\nguess_partners = 63\nguess_gigabytes = 1.75\n",
        ("partners", "gigabytes"),
    ),
    Known("by coordinates", "groups", GROUPS),
    Known(
        "the first dimension has neighbours",
        "groups",
        changed(
            GROUPS,
            (
                "*(range(size) for size in mesh.values())",
                "*map(range, [*mesh.values()][::-1])",
            ),
            (
                "    mine = places[rank]",
                "    places = [p[::-1] for p in places]\n    mine = places[rank]",
            ),
        ),
        (EIGHT, OTHER),
    ),
    Known(
        "without the rank itself",
        "groups",
        changed(GROUPS, ("if all(", "if other != rank and all(")),
        (EIGHT, OTHER),
    ),
    Known(
        "two in each dimension",
        "groups",
        """# answer: groups
def groups(rank, mesh):
    found, stride = {}, 1
    for name in reversed(mesh):
        found[name] = sorted([rank, rank ^ stride])
        stride *= 2
    return {name: found[name] for name in mesh}
""",
        (OTHER,),
    ),
    Known(
        "as a tuple", "layout", changed(LAYOUT, ("    return best", "    return tuple(best)"))
    ),
    Known(
        "FSDP over all",
        "layout",
        "# answer: layout\ndef layout(case):\n    return [1, case['gpus'], 1]\n",
        (FITS, NETWORKS, CLUSTERS),
    ),
    Known(
        "as much tensor parallelism as a node has",
        "layout",
        "# answer: layout\ndef layout(case):\n    return [1, case['gpus'] // 8, 8]\n",
        (NETWORKS, CLUSTERS),
    ),
    Known(
        "always the same",
        "layout",
        "# answer: layout\ndef layout(case):\n    return [8, 2, 4]\n",
        (FITS, NETWORKS, CLUSTERS),
    ),
    Known(
        "memory is forgotten",
        "layout",
        changed(LAYOUT, ('sequence // tensor > case["memory"]', "sequence // tensor < 0")),
        (FITS, CLUSTERS),
    ),
    Known(
        "all links are as fast as those of a node",
        "layout",
        changed(LAYOUT, ('speed = min(speed, case["between"] * min(each, shards))', "pass")),
        (NETWORKS, CLUSTERS),
    ),
    Known(
        "the bubble is forgotten",
        "layout",
        changed(LAYOUT, ("seconds *= 1 + (stages - 1) / rows", "pass")),
        (NETWORKS, CLUSTERS),
    ),
    Known(
        "the all-reduces of tensor parallelism are forgotten",
        "layout",
        changed(
            LAYOUT,
            ('seconds += sums * 2 * (tensor - 1) / tensor * size / case["inside"]', "pass"),
        ),
        (NETWORKS, CLUSTERS),
    ),
    Known(
        "no size above 8",
        "layout",
        changed(LAYOUT, ("range(11)", "range(4)")),
        (CLUSTERS,),
    ),
    Known(
        "a rank in each dimension",
        "layout",
        "# answer: layout\ndef layout(case):\n    return [1, 1, 1]\n",
        (FITS, NETWORKS, CLUSTERS),
    ),
]
