"""Known answers to the exercises of lesson 15."""

import inspect
import runpy

from known import Known, changed, solved

from multigpu.course import find_root

LESSON = "15-fsdp"
ADAMW, LINEAR = (solved(LESSON, name) for name in ("sharded_adamw", "sharded_linear"))
TWO, SENT, ODD = "two ranks", "what is sent", "three ranks, odd sizes"
FORWARD, BACKWARD, KEPT = "forward", "backward", "what is kept"
OTHER = "three ranks, other sizes"
ONE, TWO_IDEAS, BEST, CLUSTERS = (
    "at most 4.2 s",
    "at most 3.1 s",
    "at most 2.9 s",
    "other clusters",
)
NO_POINTS = (ONE, TWO_IDEAS, BEST, CLUSTERS)

PLAIN_ADAMW = """# answer: sharded_adamw
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights = weights
        self.optimizer = torch.optim.AdamW(weights, lr)

    def step(self):
        for weight in self.weights:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
        self.optimizer.step()
"""
BY_WEIGHT = """# answer: sharded_adamw
class ShardedAdamW:
    def __init__(self, weights, lr):
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.weights = weights
        self.own = [nn.Parameter(self.parts(weight.data)[rank].clone()) for weight in weights]
        self.optimizer = torch.optim.AdamW(self.own, lr)

    def parts(self, tensor):
        flat = tensor.flatten()
        return list(F.pad(flat, (0, -len(flat) % self.ranks)).chunk(self.ranks))

    def step(self):
        for weight, own in zip(self.weights, self.own):
            own.grad = torch.empty_like(own)
            dist.reduce_scatter(own.grad, self.parts(weight.grad / self.ranks))
        self.optimizer.step()
        for weight, own in zip(self.weights, self.own):
            parts = [torch.empty_like(own.data) for _ in range(self.ranks)]
            dist.all_gather(parts, own.data)
            weight.data = torch.cat(parts)[: weight.numel()].view_as(weight)
"""
REUSED = changed(
    LINEAR,
    (
        "ctx.save_for_backward(x, part)\n        return x @ ShardedLinear.whole(part).T",
        "weight = ShardedLinear.whole(part)\n"
        "        ctx.save_for_backward(x, part, weight)\n"
        "        return x @ weight.T",
    ),
    ("x, part = ctx.saved_tensors", "x, part, weight = ctx.saved_tensors"),
    ("gradient @ ShardedLinear.whole(part)", "gradient @ weight"),
)
PLANS = runpy.run_path(str(find_root() / "lessons" / LESSON / "plans.py"))
OF_NUMBERS = f"""# answer: plan
{inspect.getsource(PLANS["of_numbers"])}

def plan(cluster):
    return of_numbers(@)
"""
# Groups of a node where they fit: a block's weights are 2 GiB.
GROUP = "8 if cluster['memory'] > (cluster['blocks'] + 9.5) * 2**30 else 16"


def of_numbers(numbers: str) -> str:
    return changed(OF_NUMBERS, ("@", numbers))


PREFETCH = of_numbers("cluster['blocks'], 16, 1, 1")
FITTED = of_numbers(f"cluster['blocks'], {GROUP}, 1, 1")
KNOWN = [
    Known(
        "all 16 share, and every number goes to a GPU once",
        "guess_share",
        "# answer: guess_share\nguess_kept = 6\nguess_sent = 42\n",
        ("kept", "sent"),
    ),
    Known(
        "computed",
        "guess_share",
        "# answer: guess_share\nguess_kept = 6e9 * (4 + 4 + 8) / 8 / 1e9\nguess_sent = 63.0\n",
    ),
    Known("each rank has the whole state", "sharded_adamw", PLAIN_ADAMW, (SENT,)),
    Known(
        "the ranks' own gradients",
        "sharded_adamw",
        changed(
            ADAMW,
            (
                "dist.reduce_scatter(self.part.grad, gradients)",
                "self.part.grad = gradients[self.rank] * self.ranks",
            ),
        ),
        (TWO, SENT, ODD),
    ),
    Known(
        "no zeros at the end",
        "sharded_adamw",
        changed(ADAMW, ("F.pad(flat, (0, -len(flat) % self.ranks))", "flat")),
        (ODD,),
    ),
    Known("part by part of each weight", "sharded_adamw", BY_WEIGHT),
    Known("keeps the whole weight", "sharded_linear", REUSED, (KEPT,)),
    Known(
        "the sum over the ranks",
        "sharded_linear",
        changed(LINEAR, ("gradient.T @ x / ranks", "gradient.T @ x")),
        (BACKWARD, OTHER),
    ),
    Known(
        "made for two ranks",
        "sharded_linear",
        changed(LINEAR, ("gradient.T @ x / ranks", "gradient.T @ x / 2")),
        (OTHER,),
    ),
    Known(
        "the parts in the wrong order in forward",
        "sharded_linear",
        changed(
            LINEAR,
            (
                "return x @ ShardedLinear.whole(part).T",
                "return x @ ShardedLinear.whole(part).flip(0).T",
            ),
        ),
        (FORWARD, KEPT, OTHER),
    ),
    Known(
        "a matrix product of its own in backward",
        "sharded_linear",
        changed(
            LINEAR,
            (
                "gradient @ ShardedLinear.whole(part)",
                "(ShardedLinear.whole(part).T @ gradient.T).T",
            ),
        ),
    ),
    Known("naive", "plan", "# answer: plan\nplan = naive\n", NO_POINTS),
    Known(
        "naive by its own code", "plan", of_numbers("cluster['blocks'], 16, 0, 0"), NO_POINTS
    ),
    Known("prefetching alone", "plan", PREFETCH, (TWO_IDEAS, BEST)),
    Known(
        "groups of a node alone",
        "plan",
        of_numbers(f"cluster['blocks'], {GROUP}, 0, 1"),
        (TWO_IDEAS, BEST, CLUSTERS),
    ),
    Known(
        "gathers the last block again",
        "plan",
        of_numbers(f"cluster['blocks'], {GROUP}, 1, 0"),
        (BEST,),
    ),
    Known("made for one cluster", "plan", of_numbers("8, 8, 1, 1"), (CLUSTERS,)),
    Known(
        "does not look at the memory",
        "plan",
        of_numbers("cluster['blocks'], 8, 1, 1"),
        (CLUSTERS,),
    ),
    Known(
        "keeps all weights, which do not fit",
        "plan",
        of_numbers("cluster['blocks'], 16, 1, cluster['blocks']"),
        NO_POINTS,
    ),
    Known(
        "groups of 4, which do not fit",
        "plan",
        of_numbers("cluster['blocks'], 4, 1, 1"),
        NO_POINTS,
    ),
    Known(
        "does not reduce block 0",
        "plan",
        changed(
            PREFETCH,
            (
                '    return {"group"',
                '    steps.remove(("reduce", 0))\n    return {"group"',
            ),
        ),
        NO_POINTS,
    ),
    Known(
        "no backward at all",
        "plan",
        changed(PREFETCH, ('("backward", block), ', "")),
        NO_POINTS,
    ),
    Known("by four numbers", "plan", FITTED),
]
