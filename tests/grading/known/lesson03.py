"""Lesson 03: answers with known scores."""

from known import Known

TRANSFER = "320 images"
SGD, ADAM = "SGD and a large batch", "Adam and a small batch"
PIXELS, NETWORKS = "images with many pixels", "other numbers of layers"
TWO, FOUR = "2 ranks, 4 micro-batches", "4 ranks, 8 micro-batches"
OTHER, FEW = "other numbers", "few micro-batches"
GPUS, PLACEMENTS = "two GPUs", "other placements"


def peak(**changes: str) -> str:
    """The solution's algorithm, with some of its lines changed."""
    lines = {
        "optimizer": 'state, temporary = {"sgd": (1, 0), "adam": (2, 1)}[optimizer]',
        "images": "images = widths[0]",
        "step": "moments = [(2 + state + temporary) * weights + batch * images]",
        "tanh": "moments.append(held + batch * (kept + 2 * widths[layer]))",
        "linear": "moments.append(held + sizes[layer - 1] + batch * (kept + into))",
        "result": "return 4 * max(moments)",
    } | changes
    return f"""# answer: peak
def peak(widths, batch, optimizer):
    sizes = [(widths[i] + 1) * widths[i + 1] for i in range(len(widths) - 1)]
    weights = sum(sizes)
    last = len(sizes)
    {lines["optimizer"]}
    {lines["images"]}
    {lines["step"]}
    for layer in reversed(range(1, last + 1)):
        held = (1 + state) * weights + sum(sizes[layer:])
        kept = images + sum(widths[1 : layer + 1])
        into = widths[layer - 1] if layer > 1 else 0
        if layer < last:
            {lines["tanh"]}
        {lines["linear"]}
    {lines["result"]}
"""


# Another algorithm: a list of what is alive, which grows and shrinks as in the step.
ALIVE = """# answer: peak
class Memory:
    def __init__(self):
        self.numbers, self.most = 0, 0

    def add(self, numbers):
        self.numbers += numbers
        self.most = max(self.most, self.numbers)


def peak(widths, batch, optimizer):
    layers = [(n_in * n_out + n_out, batch * n_in, batch * n_out) for n_in, n_out in
              zip(widths[:-1], widths[1:])]
    weights = sum(size for size, _, _ in layers)
    memory = Memory()
    memory.add(weights * (3 if optimizer == "adam" else 2) + layers[0][1])
    for _, _, outputs in layers:
        memory.add(outputs)
    for number, (size, inputs, outputs) in reversed(list(enumerate(layers))):
        if number + 1 < len(layers):
            memory.add(outputs)  # the gradient after tanh is there already
            memory.add(-2 * outputs)
        memory.add(size)
        if number:
            memory.add(inputs)
        memory.add(-outputs)
    if optimizer == "adam":
        memory.add(weights)
    return memory.most * 4
"""


def order(ahead: str, body: str = "") -> str:
    """An order of `ahead` forwards, then one backward and one forward in turn."""
    return f"""# answer: order_1f1b
def order_1f1b(rank, stages, micro_batches):
    ahead = {ahead}
    order = ["F%d" % (n + 1) for n in range(ahead)]
    for n in range(1, micro_batches + 1):
        order.append(f"B{{n}}")
        if n + ahead <= micro_batches:
            order.append(f"F{{n + ahead}}")
    {body or 'return " ".join(order)'}
"""


MEGATRON = """# answer: order_1f1b
def order_1f1b(rank, stages, micro_batches):
    warm_up = min(stages - rank - 1, micro_batches)
    forward, backward, actions = 0, 0, ""
    for _ in range(warm_up):
        forward += 1
        actions += f"F{forward} "
    for _ in range(micro_batches - warm_up):
        forward, backward = forward + 1, backward + 1
        actions += f"F{forward} B{backward} "
    for _ in range(warm_up):
        backward += 1
        actions += f"B{backward} "
    return actions
"""

GPIPE = """# answer: order_1f1b
def order_1f1b(rank, stages, micro_batches):
    numbers = range(1, micro_batches + 1)
    return " ".join([f"F{n}" for n in numbers] + [f"B{n}" for n in numbers])
"""

ONE_CHANGE = """# answer: moves
def moves(placement):
    plan = [None] * len(placement)
    plan[0] = placement[0]
    for layer in range(1, len(placement)):
        if placement[layer] != placement[layer - 1]:
            plan[layer] = placement[layer]
            break
    return plan + [placement[-1]]
"""

ALL = (SGD, ADAM, PIXELS, NETWORKS)
ALL_ORDERS = (TWO, FOUR, OTHER, FEW)

KNOWN = [
    # ---- guess_transfer
    Known("30, rounded", "guess_transfer", "# answer: guess_transfer\nguess_transfer = 30.0"),
    Known(
        "forward only",
        "guess_transfer",
        "# answer: guess_transfer\nguess_transfer = 320 * 16 * 28 * 28 * 4 / 2**20",
        (TRANSFER,),
    ),
    # ---- peak
    Known("what is alive", "peak", ALIVE),
    Known(
        "Adam as SGD",
        "peak",
        peak(optimizer="state, temporary = 1, 0"),
        (ADAM, NETWORKS),
    ),
    Known(
        "the peak before backward",
        "peak",
        peak(result="return 4 * ((1 + state) * weights + batch * sum(widths))"),
        ALL,
    ),
    Known("the images forgotten", "peak", peak(images="images = 0"), (PIXELS,)),
    Known(
        "the peak at the first tanh, as in the notebook",
        "peak",
        peak(result="return 4 * ((2 + state) * weights + batch * (images + 3 * widths[1]))"),
        (SGD, ADAM, NETWORKS),
    ),
    Known(
        "three layers only",
        "peak",
        peak(
            optimizer='state, temporary = {"sgd": (1, 0), "adam": (2, 1)}[optimizer]'
        ).replace("    weights =", "    _, _, _ = sizes\n    weights ="),
        (NETWORKS,),
    ),
    Known("no gradients before tanh", "peak", peak(tanh="pass"), (SGD, PIXELS, NETWORKS)),
    # ---- order_1f1b
    Known("Megatron's three loops", "order_1f1b", MEGATRON),
    Known("GPipe's order", "order_1f1b", GPIPE, ALL_ORDERS),
    Known(
        "warm-up one too short: hangs",
        "order_1f1b",
        order("min(stages - rank - 1, micro_batches)"),
        ALL_ORDERS,
    ),
    Known(
        "last drains missing",
        "order_1f1b",
        order(
            "min(stages - rank, micro_batches)", 'return " ".join(order[: 1 - ahead or None])'
        ),
        ALL_ORDERS,
    ),
    Known("min forgotten", "order_1f1b", order("stages - rank"), (FEW,)),
    Known(
        "2 and 4 ranks only",
        "order_1f1b",
        order("min({2: [2, 1], 4: [4, 3, 2, 1]}[stages][rank], micro_batches)"),
        (OTHER,),
    ),
    # ---- moves
    Known(
        "always the layer's GPU",
        "moves",
        "# answer: moves\ndef moves(placement):\n    return placement + placement[-1:]",
    ),
    Known(
        "as it was",
        "moves",
        "# answer: moves\nmoves = broken_moves",
        (GPUS, PLACEMENTS),
    ),
    Known("one change only", "moves", ONE_CHANGE, (PLACEMENTS,)),
]
