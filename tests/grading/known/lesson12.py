"""Known answers to lesson 12's exercises: see tests/support/known.py."""

from known import Known, broken, changed, solved

LOST = ("800 images, resumed at 600",)
GUESS = "# answer: guess_lost\nguess_lost = "

GUESSES = [
    Known("guess: the formula", "guess_lost", GUESS + "200 * 600 / 800"),
    Known("guess: none", "guess_lost", GUESS + "0", LOST),
    Known("guess: all that were left", "guess_lost", GUESS + "200", LOST),
]

# ---- shards ---------------------------------------------------------------------------------

FIRST = "from the first image"
UNEVEN = "batches that the ranks do not divide"
CHANGE = "the ranks change in the epoch"
OTHER_WORLDS = "other worlds"
MENDED = solved("12", "shards")
HEAD = MENDED[: MENDED.index("    rows = []")]

# Neighbours in the order are on one rank.
IN_A_ROW = """    rest, rows = order[done:], []
    while rest:
        now, rest = rest[:batch], rest[batch:]
        size = (len(now) + ranks - 1) // ranks
        now = now + [-1] * (size * ranks - len(now))
        rows.append(now[rank * size : (rank + 1) * size])
    return rows
"""
# The ranks divide the rest of the epoch first, and then cut it into their own batches.
RANK_FIRST = """    own, size = order[done:][rank::ranks], batch // ranks
    return [own[at : at + size] for at in range(0, len(own), size)]
"""
PAD_ALL = changed(MENDED, ("images[rank::ranks]", "(images[rank::ranks] + [-1])[:length]"))
NO_PADDING = changed(MENDED, ("own + [-1] * (length - len(own))", "own"))
STARTS_AGAIN = changed(MENDED, ("range(done, ", "range(0, "))
ALL_ON_EACH = changed(MENDED, ("images[rank::ranks]", "images"))
ROUNDS_DOWN = changed(
    MENDED, ("own + [-1] * (length - len(own))", "own[: len(images) // ranks]")
)
DROPS_LAST = changed(MENDED, ("len(order), batch", "len(order) - batch + 1, batch"))
STEP_AT_THE_END = changed(
    MENDED,
    ("    rows = []", "    if done == len(order):\n        return [[-1]]\n    rows = []"),
)
UNLIKE_FIRST = (UNEVEN, CHANGE, OTHER_WORLDS)

SHARDS = [
    Known("shards: in a row", "shards", HEAD + IN_A_ROW),
    Known("shards: padded on each rank", "shards", PAD_ALL),
    Known("shards: no padding", "shards", NO_PADDING, UNLIKE_FIRST),
    Known("shards: starts again", "shards", STARTS_AGAIN, (CHANGE, OTHER_WORLDS)),
    Known("shards: all on each rank", "shards", ALL_ON_EACH, (FIRST, *UNLIKE_FIRST)),
    Known("shards: rounds down", "shards", ROUNDS_DOWN, UNLIKE_FIRST),
    Known("shards: the rank's part first", "shards", HEAD + RANK_FIRST, UNLIKE_FIRST),
    Known("shards: drops the last batch", "shards", DROPS_LAST, UNLIKE_FIRST),
    Known("shards: a step when nothing is left", "shards", STEP_AT_THE_END, (OTHER_WORLDS,)),
]

# ---- save_plan ------------------------------------------------------------------------------

ANY_MOMENT = "a cut at any moment"
TWO_CUTS = "two cuts"

PLAN = "# answer: save_plan\ndef save_plan(step, model, optimizer):\n"
BROKEN = broken("12", "save_plan")
ONE_FILE = solved("12", "save_plan")
SYNC = '        ("sync", "checkpoint.tmp"),\n'
RENAME = '        ("rename", "checkpoint.tmp", "checkpoint"),\n'
# Two files for each step. The file that names the newest step is renamed when both are whole.
STEP_NAMES = (
    PLAN
    + """    return [
        ("write", f"model-{step}", model),
        ("sync", f"model-{step}"),
        ("write", f"optimizer-{step}", optimizer),
        ("sync", f"optimizer-{step}"),
        ("write", "tmp", str(step)),
        ("sync", "tmp"),
        ("rename", "tmp", "newest"),
    ]

def load(files):
    if "newest" not in files:
        return None
    step = files["newest"]
    return int(step), files[f"model-{step}"], files[f"optimizer-{step}"]
"""
)
CHECKSUMS = (
    PLAN
    + """    import zlib
    text = f"{step} {model} {optimizer}"
    name = f"{step}-{zlib.crc32(text.encode())}"
    return [("write", name, text), ("sync", name)]

def load(files):
    import zlib
    good = []
    for name, text in files.items():
        if name.endswith(f"-{zlib.crc32(text.encode())}"):
            step, model, optimizer = text.split()
            good.append((int(step), model, optimizer))
    return max(good, default=None)
"""
)
# Two files in turn, each overwritten: a second cut destroys the other one.
IN_TURN = (
    PLAN
    + """    import zlib
    text = f"{step} {model} {optimizer}"
    name = "even" if step % 20 == 0 else "odd"
    return [("write", name, f"{zlib.crc32(text.encode())} {text}"), ("sync", name)]

def load(files):
    import zlib
    good = []
    for text in files.values():
        checksum, _, rest = text.partition(" ")
        if checksum == str(zlib.crc32(rest.encode())):
            step, model, optimizer = rest.split()
            good.append((int(step), model, optimizer))
    return max(good, default=None)
"""
)
EARLY_RENAME = changed(ONE_FILE, (SYNC + RENAME, RENAME + '        ("sync", "checkpoint"),\n'))
NO_SYNC = changed(ONE_FILE, (SYNC, ""))
IN_PLACE = changed(
    ONE_FILE,
    ('"write", "checkpoint.tmp"', '"write", "checkpoint"'),
    (SYNC + RENAME, '        ("sync", "checkpoint"),\n'),
)
SYNC_FIRST = changed(
    BROKEN,
    (
        """        plan.append(("rename", f"{name}.tmp", name))
        plan.append(("sync", name))
""",
        """        plan.append(("sync", f"{name}.tmp"))
        plan.append(("rename", f"{name}.tmp", name))
""",
    ),
)

SAVES = [
    Known("save: a file that names the newest", "save_plan", STEP_NAMES),
    Known("save: names with checksums", "save_plan", CHECKSUMS),
    Known("save: the broken program", "save_plan", BROKEN, (ANY_MOMENT, TWO_CUTS)),
    Known("save: sync, but two renames", "save_plan", SYNC_FIRST, (ANY_MOMENT, TWO_CUTS)),
    Known("save: renamed before sync", "save_plan", EARLY_RENAME, (ANY_MOMENT, TWO_CUTS)),
    Known("save: no sync", "save_plan", NO_SYNC, (ANY_MOMENT, TWO_CUTS)),
    Known("save: in place", "save_plan", IN_PLACE, (ANY_MOMENT, TWO_CUTS)),
    Known("save: two files in turn", "save_plan", IN_TURN, (TWO_CUTS,)),
    Known(
        "save: nothing",
        "save_plan",
        PLAN + "    return []\n\ndef load(files):\n    return None\n",
        (ANY_MOMENT, TWO_CUTS),
    ),
]

# ---- agree ----------------------------------------------------------------------------------

ONE_RANK = "a signal to one rank of two"
EACH_RANK = "a signal to each rank of two"
OTHER_SIGNALS = "other ranks and signals"
AGREE = "# answer: agree\ndef agree(received):\n"
GATHER = """    empty = torch.zeros(1, dtype=torch.long)
    found = [empty.clone() for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([received]))
    return max(int(each) for each in found)
"""
NEIGHBOUR = """    empty = torch.zeros(1, dtype=torch.long)
    found = [empty.clone() for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([received]))
    return max(received, int(found[dist.get_rank() - 1]))
"""
COUNTS = """    counts = torch.tensor([received == USR1, received == TERM]).long()
    dist.all_reduce(counts)
    if counts[1]:
        return TERM
    return USR1 if counts[0] else NOTHING
"""
MAXIMUM = solved("12", "agree")
SUM = changed(MAXIMUM, (", dist.ReduceOp.MAX", ""))
ONLY_IF = changed(MAXIMUM, ("    dist.all", "    if received:\n        dist.all"))
USR1_FIRST = changed(
    COUNTS,
    ("counts[1]:\n        return TERM", "counts[0]:\n        return USR1"),
    ("USR1 if counts[0] else", "TERM if counts[1] else"),
)
ALL = (ONE_RANK, EACH_RANK, OTHER_SIGNALS)

SIGNALS = [
    Known("agree: all_gather", "agree", AGREE + GATHER),
    Known("agree: counts", "agree", AGREE + COUNTS),
    Known("agree: own signal alone", "agree", AGREE + "    return received\n", ALL),
    Known("agree: a neighbour's signal", "agree", AGREE + NEIGHBOUR, (OTHER_SIGNALS,)),
    Known("agree: only with a signal", "agree", ONLY_IF, (ONE_RANK, OTHER_SIGNALS)),
    Known("agree: a sum", "agree", SUM, (EACH_RANK, OTHER_SIGNALS)),
    Known("agree: USR1 first", "agree", AGREE + USR1_FIRST, (EACH_RANK, OTHER_SIGNALS)),
]

KNOWN = [*GUESSES, *SHARDS, *SAVES, *SIGNALS]
