"""Known answers to the exercises of lesson 15."""

from known import Known, changed, solved

LESSON = "15-fsdp"
ADAMW, LINEAR, CLIP = (
    solved(LESSON, name) for name in ("sharded_adamw", "sharded_linear", "clip")
)
TWO, SENT, ODD = "two ranks", "what is sent", "three ranks, odd sizes"
FORWARD, BACKWARD, KEPT = "forward", "backward", "what is kept"
OTHER = "three ranks, other sizes"
LIMIT, NONE = "below the limit", "a rank without gradients"

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
LOCAL_NORM = """# answer: clip
def clip(gradients, limit):
    norm = torch.cat([torch.zeros(1), *(gradient.flatten() for gradient in gradients)]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / max(norm.item(), 1e-6)))
    return norm.item()
"""

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
    Known("the norm of its own part", "clip", LOCAL_NORM, (TWO, LIMIT, NONE)),
    Known(
        "scales to the limit, also from below",
        "clip",
        changed(CLIP, ("min(1.0, limit / max(norm, 1e-6))", "limit / norm")),
        (LIMIT,),
    ),
    Known(
        "a rank without gradients stays away",
        "clip",
        changed(
            CLIP,
            (
                "    total = torch.zeros(())\n",
                "    total = torch.zeros(())\n    if not gradients:\n        return 0.0\n",
            ),
        ),
        (NONE,),
    ),
    Known(
        "norms of the ranks",
        "clip",
        changed(CLIP, ("total.sqrt().item()", "total.item() ** 0.5")),
    ),
]
