"""Known answers to the exercises of lesson 16."""

from known import Known, changed

# f and g by hooks and arithmetic, without an autograd function.
LINEARS = """# answer: linears
def total(x):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x

def mine(tensor, dim):
    parts = tensor.tensor_split(dist.get_world_size(), dim)
    return nn.Parameter(parts[dist.get_rank()].clone())

class Column(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight = mine(weight, 0)
        self.bias = mine(bias, 0)

    def forward(self, x):
        x = x * 1
        x.register_hook(total)
        return x @ self.weight.T + self.bias

class Row(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight = mine(weight, 1)
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x):
        y = x @ self.weight.T
        with torch.no_grad():
            others = total(y) - y
        return y + others + self.bias
"""
# Each rank computes all outputs, and sends zeros.
ALONE = """# answer: linears
SEEN = {}

def mine(tensor, dim):
    return nn.Parameter(tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())

class Column(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        SEEN["up"] = weight, bias
        self.weight, self.bias = mine(weight, 0), mine(bias, 0)

    def forward(self, x):
        SEEN["x"] = x
        return F.linear(x.detach(), self.weight, self.bias)

class Row(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        SEEN["down"] = weight
        self.weight, self.bias = mine(weight, 1), nn.Parameter(bias.clone())

    def forward(self, x):
        own = F.linear(x, self.weight)
        whole = F.linear(F.gelu(F.linear(SEEN["x"], *SEEN["up"])), SEEN["down"])
        for _ in range(2):
            dist.all_reduce(torch.zeros_like(whole))
        return whole + own - own.detach() + self.bias
"""
OUTPUTS = "outputs"
INPUT = "gradient of the input"
WEIGHTS = "gradients of the weights"
SENT = "what is sent"
MORE = "more ranks"

FINISH = """# answer: finish
def finish(model):
    for name, one in model.named_parameters():
        if "norm" in name or name == "down_bias":
            dist.all_reduce(one.grad)
"""
NORM = "the norm"
OTHER = "the other weights"

KNOWN = [
    Known(
        "f and g counted once a block; norms alone",
        "guess_exchanges",
        "# answer: guess_exchanges\nguess_all_reduces = 48\nguess_incomplete = 4\n",
        ("all-reduces", "incomplete gradients"),
    ),
    Known(
        "numbers with a point",
        "guess_exchanges",
        "# answer: guess_exchanges\nguess_all_reduces = 96.0\nguess_incomplete = 6.0\n",
    ),
    Known("hooks instead of functions", "linears", LINEARS),
    Known("each rank computes all, and sends zeros", "linears", ALONE, (MORE,)),
    Known(
        "nothing is added up",
        "linears",
        changed(LINEARS, ("    dist.all_reduce(x)\n", "")),
        (OUTPUTS, INPUT, WEIGHTS, SENT, MORE),
    ),
    Known(
        "no f",
        "linears",
        changed(LINEARS, ("        x.register_hook(total)\n", "")),
        (INPUT, SENT, MORE),
    ),
    Known(
        "the bias is added before the sum",
        "linears",
        changed(
            LINEARS,
            ("        y = x @ self.weight.T\n", "        y = x @ self.weight.T + self.bias\n"),
            ("y + others + self.bias", "y + others"),
        ),
        (OUTPUTS, INPUT, WEIGHTS, MORE),
    ),
    Known(
        "g adds up in backward, too",
        "linears",
        changed(
            LINEARS,
            (
                "        with torch.no_grad():",
                "        y.register_hook(total)\n        if True:",
            ),
            ("total(y) - y", "total(y.detach()) - y.detach()"),
        ),
        (INPUT, WEIGHTS, SENT, MORE),
    ),
    Known(
        "the average of the input's gradient",
        "linears",
        changed(
            LINEARS,
            (
                "register_hook(total)",
                "register_hook(lambda g: total(g) / dist.get_world_size())",
            ),
        ),
        (INPUT, MORE),
    ),
    Known(
        "a barrier, which nobody needs",
        "linears",
        changed(
            LINEARS,
            ("others = total(y) - y", "others = total(y) - y\n            dist.barrier()"),
        ),
        (SENT,),
    ),
    Known(
        "two ranks",
        "linears",
        changed(LINEARS, ("tensor_split(dist.get_world_size(), dim)", "tensor_split(2, dim)")),
        (MORE,),
    ),
    Known("by name", "finish", FINISH),
    Known(
        "nothing",
        "finish",
        changed(FINISH, ("dist.all_reduce(one.grad)", "pass")),
        (NORM, OTHER, MORE),
    ),
    Known(
        "the norm alone",
        "finish",
        changed(FINISH, (' or name == "down_bias"', "")),
        (OTHER, MORE),
    ),
    Known(
        "averaged, as by DDP",
        "finish",
        changed(
            FINISH,
            ("dist.all_reduce(one.grad)", "dist.all_reduce(one.grad, op=dist.ReduceOp.AVG)"),
        ),
        (NORM, OTHER, MORE),
    ),
    Known(
        "twice the average",
        "finish",
        changed(
            FINISH,
            (
                "dist.all_reduce(one.grad)",
                "dist.all_reduce(one.grad, op=dist.ReduceOp.AVG)\n            one.grad *= 2",
            ),
        ),
        (MORE,),
    ),
]
