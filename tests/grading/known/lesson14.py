"""Known answers to the exercises of lesson 14."""

from known import Known

PEAK = """# answer: peak_bytes
def peak_bytes(layers, hidden, rows):
    weights = 4 * layers * 8 * hidden**2
    always = 3 * weights + 2 * 8.125 * 2**20
    kept = layers * 40 * rows * hidden + 16 * rows * hidden
    return always + max(kept, 2 * weights)
"""
MANY = "many rows"
FEW = "few rows"
OTHER = "other sizes"

CHECKPOINT = """# answer: checkpoint
class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.random = torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            again = ctx.block(x)
        torch.set_rng_state(now)
        again.backward(gradient)
        return None, x.grad
"""
GRADIENTS = "gradients"
TWICE = "computed twice"
RANDOM = "random numbers"


def changed(answer: str, old: str, new: str) -> str:
    """The answer with `old` replaced."""
    assert old in answer, old
    return answer.replace(old, new)


KNOWN = [
    Known(
        "one graph, and detach is no help",
        "guess_graphs",
        "# answer: guess_graphs\nguess_losses = 1\nguess_average = 1\nguess_detached = 20\n",
        ("losses", "average", "detached"),
    ),
    Known(
        "16 bytes a weight, and no activations",
        "peak_bytes",
        changed(PEAK, "max(kept, 2 * weights)", "weights"),
        (MANY, FEW, OTHER),
    ),
    Known(
        "no temporary root in AdamW's step",
        "peak_bytes",
        changed(PEAK, "max(kept, 2 * weights)", "max(kept, weights)"),
        (FEW, OTHER),
    ),
    Known(
        "everything at the same time",
        "peak_bytes",
        changed(PEAK, "max(kept, 2 * weights)", "kept + 2 * weights"),
        (OTHER,),
    ),
    Known(
        "the numbers of this model alone",
        "peak_bytes",
        changed(PEAK, "    weights = 4", "    layers, hidden = 16, 1024\n    weights = 4"),
        (OTHER,),
    ),
    Known("the activations of a layer in one number", "peak_bytes", PEAK),
    Known(
        "the plain block, recorded",
        "checkpoint",
        """# answer: checkpoint
class Checkpoint:
    @staticmethod
    def apply(block, x):
        return block(x)
""",
        (TWICE,),
    ),
    Known(
        "other random numbers",
        "checkpoint",
        changed(CHECKPOINT, "        torch.set_rng_state(ctx.random)\n", ""),
        (RANDOM,),
    ),
    Known(
        "the gradient is handed on",
        "checkpoint",
        changed(CHECKPOINT, "return None, x.grad", "return None, gradient"),
        (GRADIENTS, TWICE, RANDOM),
    ),
    Known(
        "torch's own",
        "checkpoint",
        """# answer: checkpoint
from torch.utils import checkpoint as tools

class Checkpoint(torch.autograd.Function):
    @staticmethod
    def apply(block, x):
        return tools.checkpoint(block, x, use_reentrant=True)
""",
    ),
]
