# %% [markdown]
# # Exercises: DataParallel
# 35 minutes, 20 points, after the notebook PT_CNN_DataParallel. You need no GPU: virtual GPUs
# compute. Run the cells from top to bottom. Write each answer in its own cell, with the
# imports and helpers that it needs; then run the checks below it. They say what is wrong.
# Hidden checks try other values when your notebook is graded.

# %%
# setup
from multigpu.exercise import Exercise

# The second import is one that the first operation of a virtual GPU needs.
exercise = Exercise("02-data-parallel", imports=("multigpu.vgpu", "torch.distributed.tensor"))

# %%
# given
import torch
import torch.nn.functional as F
from torch import nn

from multigpu.exercise import gate


def virtual_gpus(count):
    """`count` of four virtual GPUs; the first call starts them."""
    from multigpu import vgpu

    return (vgpu.devices() or vgpu.start(4))[:count]


# %% [markdown]
# ## 1. A batch that does not divide (2 points)
# Two programs use `nn.DataParallel`. Predict a number for each.
# - Five rows go to four GPUs. How many GPUs compute?
# - Ten rows, the numbers 0 to 9, go to three GPUs. The module is a BatchNorm with
#   `momentum=1`: its running mean becomes the mean of the rows that it sees. What is the
#   running mean after one forward?

# %%
# answer: guess_busy
guess_busy = None  # GPUs that compute, of four
guess_mean = None  # the running mean
### BEGIN SOLUTION
guess_busy = 3
guess_mean = 1.5
### END SOLUTION

# %%
with exercise.check("guess_busy", "five rows on four GPUs", points=1) as student:
    busy = []

    class Witness(nn.Module):
        def forward(self, rows):
            busy.append(rows.device)
            return rows

    gpus = virtual_gpus(4)
    nn.DataParallel(Witness(), gpus)(torch.ones(5, 1, device=gpus[0]))
    student.equal(student.value("guess_busy"), len(busy), "so many GPUs compute")

# %%
with exercise.check("guess_busy", "the running mean", points=1) as student:
    gpus = virtual_gpus(3)
    norm = nn.BatchNorm1d(1, momentum=1.0).to(gpus[0])
    nn.DataParallel(norm, gpus)(torch.arange(10.0, device=gpus[0]).view(10, 1))
    student.close_to(
        student.value("guess_mean"), norm.running_mean.item(), "this is the running mean"
    )

# %% [markdown]
# ## 2. DataParallel that leaves no GPU out (9 points)
# `nn.DataParallel` cuts five rows into chunks of 2, 2 and 1: the fourth GPU has nothing to do.
# Write `data_parallel(model, rows, devices)`, which is fairer.
# - The model and the rows are on `devices[0]`. Return the model's outputs there, in the order
#   of the rows. After backward the model has the gradients of the whole batch.
# - Device number *i* computes chunk number *i*. The chunks' sizes differ by one at most, and
#   the larger ones come first: five rows on four devices are 2, 1, 1 and 1; ten are 3, 3, 2
#   and 2. A device for which no row is left computes nothing.
# - The model has weights and buffers. `forward` reads its buffers and does not change them.
#
# `Net` below is such a model. If you forget the buffers, the second GPU reads them on the
# first: `Expected all tensors to be on the same device`.


# %%
# given
class Net(nn.Module):
    """Two layers; a check sees on which devices backward passes between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.last = nn.Linear(4, 2)

    def forward(self, rows):
        hidden = self.scale * torch.tanh(self.first(rows))
        return self.last(gate(hidden, str(hidden.device)))


def new_net():
    torch.manual_seed(0)
    return Net()


def gradients_of(model):
    return {name: weight.grad for name, weight in model.named_parameters()}


def on_one_device(rows, factors):
    """Outputs and gradients of sum(outputs * factors) of one model on the CPU."""
    model = new_net()
    outputs = model(rows)
    (outputs * factors).sum().backward()
    return outputs.detach(), gradients_of(model)


def on_gpus(rows, factors, count):
    """The same by your `data_parallel`, on `count` GPUs."""
    gpus = virtual_gpus(count)
    model = new_net().to(gpus[0])
    outputs = data_parallel(model, rows.to(gpus[0]), gpus)
    (outputs * factors.to(gpus[0])).sum().backward()
    return outputs.detach(), gradients_of(model)


# %%
# answer: data_parallel
def data_parallel(model, rows, devices):
    """The model's outputs for the rows, on the first device."""
    ### BEGIN SOLUTION
    from torch.func import functional_call

    outputs = []
    for device, chunk in zip(devices, rows.tensor_split(len(devices)), strict=True):
        if len(chunk):
            state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            replica = {name: tensor.to(device) for name, tensor in state.items()}
            output = functional_call(model, replica, chunk.to(device))
            outputs.append(output.to(devices[0]))
    return torch.cat(outputs)
    ### END SOLUTION


# %%
with exercise.check("data_parallel", "outputs of 8 rows on 2 GPUs", points=1) as student:
    rows = torch.rand(8, 3, generator=student.generator)
    factors = torch.rand(8, 2, generator=student.generator)
    outputs, _ = on_one_device(rows, factors)
    got = student.call("on_gpus", rows, factors, 2)
    student.close_to(got[0], outputs, "the outputs are those of one device")

# %%
with exercise.check("data_parallel", "gradients of 8 rows on 2 GPUs", points=2) as student:
    rows = torch.rand(8, 3, generator=student.generator)
    factors = torch.rand(8, 2, generator=student.generator)
    _, gradients = on_one_device(rows, factors)
    got = student.call("on_gpus", rows, factors, 2)
    student.close_to(got[1], gradients, "the gradients are those of the whole batch")

# %%
with exercise.check("data_parallel", "the devices of 8 rows on 2 GPUs", points=1) as student:
    run = student.ranks("on_gpus", [[torch.ones(8, 3), torch.ones(8, 2), 2]])
    student.equal(
        sorted(device for _, device in run.events[0]),
        ["vgpu:0", "vgpu:1"],
        "backward passes through one replica on each GPU",
    )

# %%
with exercise.check("data_parallel", "5 and 10 rows on 4 GPUs", points=1) as student:
    for count in (5, 10):
        rows = torch.rand(count, 3, generator=student.generator)
        factors = torch.rand(count, 2, generator=student.generator)
        outputs, gradients = on_one_device(rows, factors)
        got = student.call("on_gpus", rows, factors, 4)
        student.close_to(got[0], outputs, "the outputs are those of one device")
        student.close_to(got[1], gradients, "the gradients are those of the whole batch")

# %%
with exercise.check("data_parallel", "chunks on 4 GPUs", points=3, hidden=True) as student:
    count = student.random.choice([5, 6, 9, 10, 13])
    rows = torch.rand(count, 3, generator=student.generator)
    factors = torch.rand(count, 2, generator=student.generator)
    run = student.ranks("on_gpus", [[rows, factors, 4]])
    devices = sorted(device for _, device in run.events[0])
    student.equal(devices, [f"vgpu:{i}" for i in range(4)], "each of the four GPUs computes")
    # A device multiplies by its own factor what passes its gate in backward.
    expected = torch.zeros(4, 3)
    for i, (chunk, upstream) in enumerate(
        zip(rows.tensor_split(4), factors.tensor_split(4), strict=True)
    ):
        _, gradients = on_one_device(chunk, upstream)
        expected += run.factors.get(f"vgpu:{i}", 0.0) * gradients["first.weight"]
    student.close_to(
        run.values[0][1]["first.weight"],
        expected,
        "GPU number i computes chunk number i, and the sizes differ by one at most",
        rtol=1e-4,
        atol=1e-5,
    )

# %%
with exercise.check("data_parallel", "2 rows on 4 GPUs", points=1, hidden=True) as student:
    run = student.ranks("on_gpus", [[torch.ones(2, 3), torch.ones(2, 2), 4]])
    student.equal(
        sorted(device for _, device in run.events[0]),
        ["vgpu:0", "vgpu:1"],
        "a GPU without rows computes nothing",
    )

# %% [markdown]
# ## 3. The loss inside `forward` (5 points)
# With the loss inside `forward`, the outputs do not have to go to the first GPU. But the mean
# of the chunks' means is wrong. Some rows have no label, too: their label is −1, and they do
# not count.
# - `loss_parts(outputs, labels)` runs on each GPU, with its chunk. It returns two tensors of
#   shape (1,).
# - `mean_loss(first, second)` runs on the first GPU, with what DataParallel has gathered: two
#   tensors with one value for each GPU that computes. It returns the mean cross entropy of all
#   rows that have a label, of shape ().


# %%
# given
class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 4)

    def forward(self, rows, labels):
        return loss_parts(self.net(rows), labels)


def loss_on_gpus(rows, labels, count):
    """The loss and the gradients, with `nn.DataParallel` on `count` GPUs."""
    gpus = virtual_gpus(count)
    module = nn.DataParallel(WithLoss().to(gpus[0]), gpus)
    try:
        gathered = module(rows.to(gpus[0]), labels.to(gpus[0]))
    except Exception as error:
        # DataParallel's message is the traceback of a replica; its last line says most.
        raise RuntimeError(str(error).strip().splitlines()[-1]) from None
    loss = mean_loss(*gathered)
    loss.backward()
    return loss, gradients_of(module.module)


def loss_on_one_device(rows, labels):
    model = WithLoss()
    loss = F.cross_entropy(model.net(rows), labels, ignore_index=-1)
    loss.backward()
    return loss, gradients_of(model)


# %%
# answer: loss_parts
def loss_parts(outputs, labels):
    """Two tensors of shape (1,), for the rows of one GPU."""
    ### BEGIN SOLUTION
    total = F.cross_entropy(outputs, labels, ignore_index=-1, reduction="sum")
    return total.reshape(1), (labels != -1).sum().reshape(1)
    ### END SOLUTION


def mean_loss(first, second):
    """The mean loss of all rows that have a label, from the gathered tensors."""
    ### BEGIN SOLUTION
    return first.sum() / second.sum()
    ### END SOLUTION


# %%
with exercise.check("loss_parts", "8 rows on 2 GPUs", points=1) as student:
    rows = torch.rand(8, 3, generator=student.generator)
    labels = torch.arange(8) % 4
    loss, gradients = loss_on_one_device(rows, labels)
    got = student.call("loss_on_gpus", rows, labels, 2)
    student.close_to(got[0], loss, "the loss is the mean of all rows")
    student.close_to(got[1], gradients, "the gradients are those of the mean of all rows")

# %%
with exercise.check("loss_parts", "10 rows on 4 GPUs", points=1) as student:
    rows = 5 * torch.rand(10, 3, generator=student.generator)
    labels = torch.arange(10) % 4
    loss, gradients = loss_on_one_device(rows, labels)
    got = student.call("loss_on_gpus", rows, labels, 4)
    student.close_to(got[0], loss, "the loss is the mean of all rows, chunks of 3, 3, 3 and 1")
    student.close_to(got[1], gradients, "so are the gradients")

# %%
with exercise.check("loss_parts", "rows without a label", points=1) as student:
    rows = 5 * torch.rand(12, 3, generator=student.generator)
    labels = torch.tensor([0, -1, 2, -1, -1, 1, 3, 0, -1, 2, 1, 3])
    loss, gradients = loss_on_one_device(rows, labels)
    got = student.call("loss_on_gpus", rows, labels, 2)
    student.close_to(got[0], loss, "rows without a label do not count in the loss")
    student.close_to(got[1], gradients, "nor in the gradients")

# %%
with exercise.check("loss_parts", "a GPU without labels", points=2, hidden=True) as student:
    count = student.random.randint(2, 4)
    empty = student.random.randrange(count)
    rows = 5 * torch.rand(3 * count, 3, generator=student.generator)
    labels = torch.tensor([student.random.randint(0, 3) for _ in range(3 * count)])
    labels[3 * empty : 3 * empty + 3] = -1
    loss, gradients = loss_on_one_device(rows, labels)
    got = student.call("loss_on_gpus", rows, labels, count)
    student.close_to(got[0], loss, "a chunk in which no row has a label counts 0 rows")
    student.close_to(
        got[1], gradients, "the gradients are those of the rows that have a label"
    )

# %% [markdown]
# ## 4. Good in training, bad in the test (4 points)
# In each batch, rows of the day come before those of the night, which are darker. A model with
# BatchNorm trains with `nn.DataParallel`. In training nearly all its answers are right, in the
# test, with `eval()`, about a quarter are wrong:


# %%
# given
def day_and_night(count, generator):
    """`count` rows in each class by day, then as many by night. The night is darker."""
    labels = torch.arange(4 * count) % 2
    rows = torch.randn(4 * count, 4, generator=generator)
    rows[:, 0] += 6 * labels
    rows[2 * count :] -= 4
    return rows, labels


def model_of(kind):
    """A model with a BatchNorm, or with one BatchNorm after another within modules."""
    torch.manual_seed(0)
    if kind == "one":
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8, momentum=0.3))
    return nn.Sequential(nn.Sequential(nn.BatchNorm1d(4), inner), nn.Linear(8, 2))


def statistics(model):
    """The running means and variances, by name."""
    return {name: each for name, each in model.named_buffers() if "running" in name}


def after_repair(kind, earlier, batches, training):
    """What your function leaves in a model which has trained with the rows `earlier`.

    Its running statistics, its weights, the modes of its modules, and the momenta of its
    BatchNorms.
    """
    model = model_of(kind)
    model(earlier)
    model.train(training)
    recompute_statistics(model, batches)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    return {
        "statistics": statistics(model),
        "weights": dict(model.named_parameters()),
        "modes": [module.training for module in model.modules()],
        "momenta": [norm.momentum for norm in norms],
    }


# %%
def accuracy(model, rows, labels):
    return (model(rows).argmax(1) == labels).double().mean().item()


gpus = virtual_gpus(2)
generator = torch.Generator().manual_seed(0)
model = model_of("one").to(gpus[0])
parallel = nn.DataParallel(model, gpus)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(40):
    rows, labels = (part.to(gpus[0]) for part in day_and_night(32, generator))
    optimizer.zero_grad()
    F.cross_entropy(parallel(rows), labels).backward()
    optimizer.step()
print(f"in training: {accuracy(parallel, rows, labels):.0%} are right")
model.eval()
print(f"in the test: {accuracy(model, rows, labels):.0%} are right")
print("mean of the rows:", [round(mean) for mean in rows.mean(0).tolist()])
print("running mean:", [round(mean) for mean in model[0].running_mean.tolist()])

# %% [markdown]
# Which rows has the running mean seen? Shuffled rows would have been better, but the training
# is over. Write `recompute_statistics(model, batches)`, which repairs the running statistics
# of all BatchNorms in a model. The model and the batches, a list of tensors with rows, are on
# one device. Each running mean and variance becomes the mean of its values in the batches: all
# batches count alike, and what the model saw before does not count. Weights, modes (`train` or
# `eval`) and momenta stay as they were.


# %%
# answer: recompute_statistics
def recompute_statistics(model, batches):
    """Replace the running statistics of each BatchNorm by those of the batches."""
    ### BEGIN SOLUTION
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm1d)]
    momenta = [norm.momentum for norm in norms]
    modes = {each: each.training for each in model.modules()}
    model.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean of all batches
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    for module, mode in modes.items():
        module.training = mode
    ### END SOLUTION


# %%
model.cpu()
recompute_statistics(model, [day_and_night(32, generator)[0] for _ in range(10)])
print(f"in the test: {accuracy(model, rows.cpu(), labels.cpu()):.0%} are right")

# %%
with exercise.check("recompute_statistics", "one BatchNorm", points=1) as student:
    batches = [day_and_night(4, student.generator)[0] for _ in range(3)]
    got = student.call("after_repair", "one", torch.zeros(8, 4), batches, True)
    means = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    variances = torch.stack([batch.var(0) for batch in batches]).mean(0)
    student.close_to(
        got["statistics"],
        {"0.running_mean": means, "0.running_var": variances},
        "mean and variance are those of the batches",
        rtol=1e-4,
        atol=1e-5,
    )

# %%
with exercise.check("recompute_statistics", "what stays", points=1) as student:
    batches = [day_and_night(4, student.generator)[0] for _ in range(2)]
    for training in (True, False):
        got = student.call("after_repair", "one", torch.zeros(8, 4), batches, training)
        fresh = model_of("one")
        student.equal(got["weights"], dict(fresh.named_parameters()), "the weights stay")
        student.equal(got["modes"], [training] * 5, "all modules have the mode they had")
        student.equal(got["momenta"], [0.1], "the momentum is what it was")

# %%
with exercise.check(
    "recompute_statistics", "two BatchNorms", points=2, hidden=True
) as student:
    count = student.random.randint(3, 5)
    batches = [day_and_night(4, student.generator)[0] for _ in range(count)]
    earlier = 7 + torch.randn(8, 4, generator=student.generator)
    got = student.call("after_repair", "two", earlier, batches, False)
    model = model_of("two")
    inputs = [[], []]
    for batch in batches:
        inputs[0].append(batch)
        normed = model[0][0](batch)
        inputs[1].append(model[0][1][1](model[0][1][0](normed)).detach())
    expected = {}
    for name, seen in zip(("0.0", "0.1.2"), inputs, strict=True):
        means = torch.stack([each.mean(0) for each in seen])
        variances = torch.stack([each.var(0) for each in seen])
        expected[f"{name}.running_mean"] = means.mean(0)
        expected[f"{name}.running_var"] = variances.mean(0)
    student.close_to(
        got["statistics"],
        expected,
        "each BatchNorm has the statistics of its own inputs",
        rtol=1e-4,
        atol=1e-5,
    )
    student.equal(got["momenta"], [0.1, 0.3], "each momentum is what it was")

# %%
exercise.summary()
