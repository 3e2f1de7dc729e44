"""Known answers to the exercises of lesson 02."""

from known import Known


def changed(answer: str, *changes: tuple[str, str]) -> str:
    """The answer with each (old, new) replaced."""
    for old, new in changes:
        assert old in answer, old
        answer = answer.replace(old, new)
    return answer


DATA_PARALLEL = """# answer: data_parallel
from torch.func import functional_call

def data_parallel(model, rows, devices):
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    outputs = []
    for device, chunk in zip(devices, rows.tensor_split(len(devices))):
        if len(chunk) == 0:
            continue
        replica = {name: tensor.to(device) for name, tensor in state.items()}
        output = functional_call(model, replica, chunk.to(device))
        outputs.append(output.to(devices[0]))
    return torch.cat(outputs)
"""
OUTPUTS = "outputs of 8 rows on 2 GPUs"
GRADIENTS = "gradients of 8 rows on 2 GPUs"
DEVICES = "the devices of 8 rows on 2 GPUs"
FAIR = "the devices of 5 rows on 4 GPUs"
FOUR = "5 and 10 rows on 4 GPUs"
CHUNKS = "chunks on 4 GPUs"
FEW = "2 rows on 4 GPUs"
ALL = (OUTPUTS, GRADIENTS, DEVICES, FOUR, FAIR, CHUNKS, FEW)

LOSS = """# answer: loss_parts
def loss_parts(outputs, labels):
    each = F.cross_entropy(outputs, labels, ignore_index=-1, reduction="none")
    return each.sum().reshape(1), (labels >= 0).sum().reshape(1)

def mean_loss(sums, numbers):
    return sums.sum() / numbers.sum()
"""
EIGHT = "8 rows on 2 GPUs"
TEN = "10 rows on 4 GPUs"
UNLABELED = "rows without a label"
EMPTY = "a GPU without labels"

STATISTICS = """# answer: recompute_statistics
@torch.no_grad()
def recompute_statistics(model, batches):
    modes = [(module, module.training) for module in model.modules()]
    norms = [module for module, _ in modes if isinstance(module, nn.BatchNorm1d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.running_mean.zero_()
        norm.running_var.fill_(1)
        norm.num_batches_tracked.zero_()
        norm.momentum = None
    model.train()
    for batch in batches:
        model(batch)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
    for module, mode in modes:
        module.training = mode
"""
ONE = "one BatchNorm"
STAYS = "what stays"
TWO = "two BatchNorms"

KNOWN = [
    # ---- guess_busy ---------------------------------------------------------------------
    Known(
        "all GPUs compute",
        "guess_busy",
        "# answer: guess_busy\nguess_busy = 4\nguess_mean = 1.5\n",
        ("five rows on four GPUs",),
    ),
    Known(
        "the mean of all rows",
        "guess_busy",
        "# answer: guess_busy\nguess_busy = 3\nguess_mean = 4.5\n",
        ("the running mean",),
    ),
    Known(
        "a word",
        "guess_busy",
        '# answer: guess_busy\nguess_busy = "three"\nguess_mean = None\n',
        ("five rows on four GPUs", "the running mean"),
    ),
    # ---- data_parallel ------------------------------------------------------------------
    Known(
        "nn.DataParallel",
        "data_parallel",
        "# answer: data_parallel\n"
        "def data_parallel(model, rows, devices):\n"
        "    return nn.DataParallel(model, devices)(rows)\n",
        (FAIR, CHUNKS),
    ),
    Known(
        "assumes as many chunks as devices",
        "data_parallel",
        changed(
            DATA_PARALLEL,
            (
                "zip(devices, rows.tensor_split(len(devices)))",
                "zip(devices, rows.chunk(len(devices)), strict=True)",
            ),
        ),
        (FOUR, FAIR, CHUNKS, FEW),
    ),
    Known(
        "rows left over are forgotten",
        "data_parallel",
        changed(
            DATA_PARALLEL,
            (
                "rows.tensor_split(len(devices))",
                "rows.split(max(1, len(rows) // len(devices)))",
            ),
        ),
        (FOUR, FAIR, CHUNKS),
    ),
    Known(
        "assumes four chunks",
        "data_parallel",
        changed(
            DATA_PARALLEL,
            (
                "zip(devices, rows.tensor_split(len(devices)))",
                "zip(devices, rows.tensor_split(4))",
            ),
        ),
        (OUTPUTS, GRADIENTS, DEVICES),
    ),
    Known(
        "detached replicas",
        "data_parallel",
        changed(
            DATA_PARALLEL, ("tensor.to(device)", "tensor.detach().to(device).requires_grad_()")
        ),
        (GRADIENTS, FOUR, CHUNKS),
    ),
    Known(
        "replicas on other GPUs detached",
        "data_parallel",
        changed(
            DATA_PARALLEL,
            (
                "tensor.to(device)",
                "tensor if device == devices[0] else tensor.detach().to(device)",
            ),
        ),
        (GRADIENTS, DEVICES, FOUR, FAIR, CHUNKS, FEW),
    ),
    Known(
        "without gradients",
        "data_parallel",
        changed(DATA_PARALLEL, ("def data", "@torch.no_grad()\ndef data")),
        ALL,
    ),
    Known(
        "buffers forgotten",
        "data_parallel",
        changed(DATA_PARALLEL, (" | dict(model.named_buffers())", "")),
        ALL,
    ),
    Known(
        "all on the first GPU",
        "data_parallel",
        changed(
            DATA_PARALLEL,
            ("    state =", "    devices = len(devices) * devices[:1]\n    state ="),
        ),
        ALL,
    ),
    Known(
        "the last GPU first",
        "data_parallel",
        changed(
            DATA_PARALLEL, ("return torch.cat(outputs)", "return torch.cat(outputs[::-1])")
        ),
        (OUTPUTS, GRADIENTS, FOUR, CHUNKS),
    ),
    Known(
        "the larger chunks last",
        "data_parallel",
        changed(
            DATA_PARALLEL,
            (
                "rows.tensor_split(len(devices))",
                "rows.split([len(c) for c in rows.tensor_split(len(devices))][::-1])",
            ),
        ),
        (CHUNKS, FEW),
    ),
    Known(
        "chunk i on another device",
        "data_parallel",
        changed(
            DATA_PARALLEL,
            (
                "zip(devices, rows.tensor_split(len(devices)))",
                "zip(devices[:2][::-1] + devices[2:], rows.tensor_split(len(devices)))",
            ),
        ),
        (CHUNKS,),
    ),
    Known(
        "GPUs without rows compute",
        "data_parallel",
        changed(DATA_PARALLEL, ("        if len(chunk) == 0:\n            continue\n", "")),
        (FEW,),
    ),
    Known(
        "copies of the module in threads",
        "data_parallel",
        """# answer: data_parallel
from torch.nn.parallel import gather, parallel_apply, replicate

def data_parallel(net, batch, gpus):
    least, more = divmod(len(batch), len(gpus))
    sizes = [least + 1] * more + [least] * (len(gpus) - more)
    used = [gpu for gpu, size in zip(gpus, sizes) if size]
    parts = batch.split([size for size in sizes if size])
    inputs = [(part.to(gpu),) for part, gpu in zip(parts, used)]
    places = [gpu.index for gpu in used]
    return gather(parallel_apply(replicate(net, places), inputs, devices=places), places[0])
""",
    ),
    # ---- loss_parts ---------------------------------------------------------------------
    Known(
        "mean of means",
        "loss_parts",
        """# answer: loss_parts
def loss_parts(outputs, labels):
    loss = F.cross_entropy(outputs, labels, ignore_index=-1)
    return loss.reshape(1), torch.ones(1, device=loss.device)

def mean_loss(means, ones):
    return means.mean()
""",
        (TEN, UNLABELED, EMPTY),
    ),
    Known(
        "all rows counted",
        "loss_parts",
        changed(
            LOSS,
            (
                "(labels >= 0).sum().reshape(1)",
                "torch.tensor([len(labels)], device=labels.device)",
            ),
        ),
        (UNLABELED, EMPTY),
    ),
    Known(
        "mean times number",
        "loss_parts",
        changed(
            LOSS,
            ('ignore_index=-1, reduction="none"', "ignore_index=-1"),
            ("each.sum().reshape(1)", "(each * (labels >= 0).sum()).reshape(1)"),
        ),
        (EMPTY,),
    ),
    Known(
        "chunks without labels left out of the mean of means",
        "loss_parts",
        changed(
            LOSS,
            (
                "return sums.sum() / numbers.sum()",
                "used = numbers > 0\n    return (sums[used] / numbers[used]).mean()",
            ),
        ),
        (TEN, UNLABELED),
    ),
    Known(
        "the loss as a number",
        "loss_parts",
        changed(LOSS, ("each.sum().reshape(1)", "each.detach().sum().reshape(1)")),
        (EIGHT, TEN, UNLABELED, EMPTY),
    ),
    Known(
        "parts of shape ()",
        "loss_parts",
        changed(LOSS, (".reshape(1)", "")),
        (EIGHT,),
    ),
    Known(
        "only labeled rows",
        "loss_parts",
        """# answer: loss_parts
def loss_parts(outputs, labels):
    known = labels != -1
    scores = outputs[known].log_softmax(1)
    picked = scores.gather(1, labels[known].view(-1, 1))
    return known.sum().view(1), -picked.sum().view(1)

def mean_loss(number, total):
    return (total / number.sum()).sum()
""",
    ),
    # ---- recompute_statistics -----------------------------------------------------------
    Known(
        "in eval nothing changes",
        "recompute_statistics",
        changed(STATISTICS, ("    model.train()\n", "    model.eval()\n")),
        (ONE, TWO),
    ),
    Known(
        "the mode is not changed",
        "recompute_statistics",
        changed(STATISTICS, ("    model.train()\n", "")),
        (TWO,),
    ),
    Known(
        "the old statistics count",
        "recompute_statistics",
        changed(STATISTICS, ("        norm.num_batches_tracked.zero_()\n", "")),
        (ONE, TWO),
    ),
    Known(
        "left in eval",
        "recompute_statistics",
        changed(STATISTICS, ("        module.training = mode\n", "        module.eval()\n")),
        (STAYS,),
    ),
    Known(
        "the momentum is lost",
        "recompute_statistics",
        changed(STATISTICS, ("        norm.momentum = momentum\n", "        pass\n")),
        (STAYS, TWO),
    ),
    Known(
        "only children of the model",
        "recompute_statistics",
        changed(
            STATISTICS,
            ("for module, _ in modes if", "for module in model.children() if"),
        ),
        (TWO,),
    ),
    Known(
        "training goes on",
        "recompute_statistics",
        changed(
            STATISTICS,
            ("@torch.no_grad()\n", ""),
            (
                "        model(batch)\n",
                "        model(batch).sum().backward()\n"
                "        with torch.no_grad():\n"
                "            for weight in model.parameters():\n"
                "                weight -= 0.1 * weight.grad\n",
            ),
        ),
        (STAYS,),
    ),
    Known(
        "update_bn",
        "recompute_statistics",
        """# answer: recompute_statistics
def recompute_statistics(network, loader):
    modes = {name: module.training for name, module in network.named_modules()}
    torch.optim.swa_utils.update_bn(loader, network)
    for name, module in network.named_modules():
        module.training = modes[name]
""",
    ),
]
