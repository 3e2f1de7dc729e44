# %% [markdown]
# # Exercises: precision
#
# 40 minutes, 20 points. You need lesson 11's notebook, and no GPU: the CPU computes float16
# and bfloat16, too. Run the first two code cells, then answer the questions in any order.
#
# - Write in the cells that begin with `# answer:`. All that an answer needs stands in its own
#   cell or in the cell `# given`: imports and functions, too.
# - The cell below an answer checks it, in a process of its own.
# - When your work is graded, hidden checks try other numbers.

# %%
# given
import torch
import torch.nn.functional as F
from torch import nn


def new_net():
    """4 features → 3 classes. The weights are the same in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(net, rows, labels):
    """The cross entropy, which is computed in 32 bit, also after a 16-bit forward."""
    return F.cross_entropy(net(rows).float(), labels)


def fit_float16(step, batches, factor, state, max_norm):
    """(weights, the scale after each step) of a training in float16.

    step     scaled_step, or another function with its arguments
    factor   multiplies the loss and divides the learning rate: on paper, it changes nothing
    """
    net = new_net()
    # The last feature begins without an influence: a large one has a large gradient only.
    net[0].weight.data[:, -1] = 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / factor, momentum=0.9)
    scales = []
    for rows, labels in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = factor * loss_of(net, rows, labels)
        step(loss, net, optimizer, state, max_norm)
        scales.append(state["scale"])
    return [weight.detach() for weight in net.parameters()], scales


def fit_scaled(batches, factor, state, max_norm):
    """Question 2: fit_float16 with your scaled_step."""
    return fit_float16(scaled_step, batches, factor, state, max_norm)


# %% jupyter={"source_hidden": true}
# setup
import multigpu
from multigpu.exercise import Exercise
from multigpu.exercise.verdicts import difference
from multigpu.trainer import Precision

exercise = Exercise("11-precision")
OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, 0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "Adam": lambda weights: torch.optim.Adam(weights, 0.1),
}


def fit_by_torch(batches, factor, state, max_norm):
    """fit_float16 with torch's own GradScaler."""
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=state["scale"], growth_interval=state["patience"]
    )

    def step(loss, net, optimizer, state, max_norm):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        state["scale"] = scaler.get_scale()

    return fit_float16(step, batches, factor, dict(state), max_norm)


def fit_clipping_scaled(batches, factor, state, max_norm):
    """fit_float16 with a mistake: the norm is clipped before the scale is divided out."""

    def step(loss, net, optimizer, state, max_norm):
        (loss * state["scale"]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        for weight in net.parameters():
            weight.grad /= state["scale"]
        optimizer.step()

    return fit_float16(step, batches, factor, dict(state), max_norm)


def scale_after(overflows):
    """The scale of a GradScaler after steps that overflow (True) or not."""
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=4)
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale(weight * (torch.inf if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def metered(width, optimizer, precision):
    """(weights, bytes on a virtual A100) of two layers, after the second step's forward.

    A batch of one row keeps the activations below 1% of the bytes. cuBLAS's workspaces are
    left out.
    """
    with multigpu.gpus(1, gpu="A100-40GB", shapes_only=True) as (device,):
        numbers = Precision(precision, device)
        layers = nn.Linear(1, width, bias=False), nn.Linear(width, width, bias=False)
        net = numbers.convert_module(nn.Sequential(*layers)).to(device)
        stepper = OPTIMIZERS[optimizer](net.parameters())
        row = numbers.convert_batch(torch.ones(1, 1)).to(device)
        for _ in range(2):
            stepper.zero_grad(set_to_none=False)
            with numbers.context():
                loss = net(row).sum()
            held = multigpu.memory_held(net, stepper)[device]
            used = sum(size for use, size in held.items() if use != "workspaces")
            loss.backward()
            stepper.step()
        return sum(weight.numel() for weight in net.parameters()), used


def scale_hint(guess):
    """A hint that fits the guess of question 1."""
    if guess == 65_536 / 2**3:
        return "that is the scale after three overflows: what do nine good steps change?"
    if isinstance(guess, int | float) and guess >= 65_536:
        return "it is doubled after four good steps in a row, not after each"
    return "torch has another scale: write down the scale after each step"


def expect_bytes(student, got, n, used, what):
    """A verdict about question 3, whose reason is in bytes per weight."""
    wrong = difference(got, used, rtol=0.01)
    if wrong and isinstance(got, int | float):
        wrong = f"the meter has {used / n:.1f} bytes per weight, your function {got / n:.1f}"
    student.expect(not wrong, what, wrong)


def inner_losses(rows, labels, updates, lr):
    """Question 4 without autocast: forward casts each weight to bfloat16."""
    net = new_net()
    losses = []
    for _ in range(updates):
        copies = {name: weight.bfloat16() for name, weight in net.named_parameters()}
        logits = torch.func.functional_call(net, copies, rows.bfloat16())
        loss = F.cross_entropy(logits.float(), labels)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(net.parameters(), gradients, strict=True):
                weight -= lr * gradient
        losses.append(loss.item())
    return losses


def random_batch(student, rows):
    """Rows with 4 features, and their labels."""
    features = torch.randn(rows, 4, generator=student.generator)
    return features, torch.randint(0, 3, (rows,), generator=student.generator)


# %% [markdown]
# ## 1. Predict the scale (2 points)
# A `GradScaler` begins with the scale 65,536 and `growth_interval=4`. The gradients of the
# first three steps overflow, those of the next nine do not. What is the scale after the 12
# steps? Write your number, then run the check, which runs torch's `GradScaler`.

# %%
# answer: guess_scale
guess_scale = None  # the scale after 12 steps
### BEGIN SOLUTION
guess_scale = 32768
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_scale", "the scale of torch's GradScaler", points=2) as student:
    found = scale_after([True] * 3 + [False] * 9)
    student.guess(
        "guess_scale",
        found,
        "your scale is that of torch's GradScaler",
        scale_hint(student.value("guess_scale")),
        within=0,
    )

# %% [markdown]
# ## 2. A GradScaler by hand (7 points)
# In float16, a gradient above 65,504 is infinite, and one below 6e-8 is zero. Write
# `scaled_step`, which does for one step what torch's `GradScaler` does, with the gradients'
# norm clipped to `max_norm`, as if they were in 32 bit:
#
# - The gradients are computed from the loss × `state["scale"]`, and applied without it.
# - If a gradient is not finite, nothing is applied, the momentum included, and the scale is
#   halved.
# - After `state["patience"]` good steps without a change of the scale, it is doubled.
#   `state["good"]` counts these steps.
#
# Who applies an infinite gradient gets NaN in all weights, and a loss of NaN for ever. Who
# clips scaled gradients trains with a learning rate that is thousands of times too small: the
# loss hardly falls, and no error says why. `GradScaler` itself is not allowed.


# %%
# answer: scaled_step
def scaled_step(loss, net, optimizer, state, max_norm):
    """Backward and the optimizer's step. `state` has scale, patience and good: change it."""
    ### BEGIN SOLUTION
    (loss * state["scale"]).backward()
    gradients = [weight.grad for weight in net.parameters()]
    if not all(gradient.isfinite().all() for gradient in gradients):
        state["scale"] /= 2
        state["good"] = 0
        return
    for gradient in gradients:
        gradient /= state["scale"]
    # After the division: max_norm is about the gradients without the scale.
    nn.utils.clip_grad_norm_(net.parameters(), max_norm)
    optimizer.step()
    state["good"] += 1
    if state["good"] == state["patience"]:
        state["scale"] *= 2
        state["good"] = 0
    ### END SOLUTION


# %%
with exercise.check("scaled_step", "small gradients", points=2) as student:
    rows = torch.arange(160.0).reshape(5, 8, 4).sin()
    batches = [(each, torch.arange(8) % 3) for each in rows]
    state = {"scale": 65536.0, "patience": 100, "good": 0}
    weights, _ = student.call("fit_scaled", batches, 1e-5, dict(state), 1.0)
    expected, _ = fit_by_torch(batches, 1e-5, state, 1.0)
    student.close_to(
        weights, expected, "with a loss × 1e-5, the weights are GradScaler's", rtol=1e-4
    )

# %%
with exercise.check("scaled_step", "overflow", points=2) as student:
    rows = torch.arange(384.0).reshape(12, 8, 4).sin()
    batches = [(each, torch.arange(8) % 3) for each in rows]
    state = {"scale": 2.0**24, "patience": 100, "good": 0}
    weights, scales = student.call("fit_scaled", batches, 1.0, dict(state), 1e6)
    expected, expected_scales = fit_by_torch(batches, 1.0, state, 1e6)
    student.close_to(scales, expected_scales, "the scale after each step is GradScaler's")
    student.close_to(weights, expected, "after overflows, so are the weights", rtol=1e-4)

# %%
with exercise.check("scaled_step", "clipping", points=1) as student:
    rows = torch.arange(160.0).reshape(5, 8, 4).cos()
    batches = [(each, torch.arange(8) % 3) for each in rows]
    state = {"scale": 1024.0, "patience": 100, "good": 0}
    weights, _ = student.call("fit_scaled", batches, 1.0, dict(state), 0.1)
    expected, _ = fit_by_torch(batches, 1.0, state, 0.1)
    wrong = difference(weights, expected, rtol=1e-4, atol=1e-6)
    mistaken, _ = fit_clipping_scaled(batches, 1.0, state, 0.1)
    if wrong and not difference(weights, mistaken, rtol=1e-4, atol=1e-6):
        wrong = "your weights come from clipping the gradients while they have the scale"
    student.expect(not wrong, "with gradients clipped to 0.1, the weights are right", wrong)

# %%
with exercise.check("scaled_step", "outliers", points=2, hidden=True) as student:
    batches = [random_batch(student, 8) for _ in range(20)]
    for step, (rows, _) in enumerate(batches):
        rows[:, -1] = 0
        if step in (4, 9, 12, 18):
            # So large a feature makes the gradient of the first layer infinite.
            rows[student.random.randrange(8), -1] = 60000.0
    patience = student.random.choice((3, 5))
    state = {"scale": 2.0**12, "patience": patience, "good": 0}
    weights, scales = student.call("fit_scaled", batches, 1.0, dict(state), 5.0)
    expected, expected_scales = fit_by_torch(batches, 1.0, state, 5.0)
    student.close_to(scales, expected_scales, "with outliers, the scales are GradScaler's")
    student.close_to(weights, expected, "with outliers, so are the weights", rtol=1e-4)

# %% [markdown]
# ## 3. Count the bytes (5 points)
# "Mixed precision halves the memory." Write `bytes_needed(n, optimizer, precision)`: the bytes
# on the GPU for a model with `n` weights, between forward and backward of a step. Count
# weights, gradients (of the step before, kept as zeros), the optimizer's state, and the
# 16-bit copies of the weights that autocast makes in forward and backward needs. Leave the
# activations and cuBLAS's workspaces out.
#
# - `optimizer`: `"SGD"`, `"momentum"` (SGD with momentum) or `"Adam"`
# - `precision`: `"32-true"`, `"16-mixed"`, `"bf16-mixed"` or `"bf16-true"`, as in the Trainer
#
# The check trains two layers on a virtual A100, and reads its meter. If you forget a part, the
# model fits by your calculation, but the GPU runs out of memory.


# %%
# answer: bytes_needed
def bytes_needed(n, optimizer, precision):
    ### BEGIN SOLUTION
    each = 2 if precision == "bf16-true" else 4
    states = {"SGD": 0, "momentum": 1, "Adam": 2}[optimizer]
    copies = 2 if precision in ("16-mixed", "bf16-mixed") else 0
    # A weight, its gradient, and the optimizer's numbers about it have the same type.
    return n * (each * (2 + states) + copies)
    ### END SOLUTION


# %%
with exercise.check("bytes_needed", "32 bit", points=1) as student:
    for optimizer in ("SGD", "Adam"):
        n, used = metered(512, optimizer, "32-true")
        got = student.call("bytes_needed", n, optimizer, "32-true")
        expect_bytes(student, got, n, used, f"32-true, {optimizer}: the meter's bytes")

# %%
with exercise.check("bytes_needed", "mixed precision", points=2) as student:
    n, used = metered(512, "momentum", "bf16-mixed")
    got = student.call("bytes_needed", n, "momentum", "bf16-mixed")
    expect_bytes(student, got, n, used, "bf16-mixed, momentum: the meter's bytes")

# %%
with exercise.check("bytes_needed", "other models", points=2, hidden=True) as student:
    cases = (
        ("SGD", "16-mixed"),
        ("Adam", "bf16-mixed"),
        ("momentum", "32-true"),
        ("momentum", "bf16-true"),
        ("Adam", "bf16-true"),
    )
    for optimizer, precision in cases:
        n, used = metered(student.random.randint(400, 900), optimizer, precision)
        got = student.call("bytes_needed", n, optimizer, precision)
        what = f"{precision}, {optimizer}, other models: the meter's bytes"
        expect_bytes(student, got, n, used, what)

# %% [markdown]
# ## 4. Find the bug: a loss that stands still (6 points)
# Meta-learning and some GANs make several updates on one batch. `inner_loop` below makes
# `updates` of them under autocast in bfloat16, and returns the loss before each. The weights
# do change, but the loss is the same number each time. In 32 bit, without autocast, it falls.
#
# Run the check to see it. Find the bug, and mend it in the cell. Forward must still compute in
# bfloat16, and the weights must stay in 32 bit.


# %%
# answer: inner_loop
def inner_loop(rows, labels, updates, lr):
    """The loss before each of the updates, which begin with new_net()."""
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr)
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(updates):
            loss = loss_of(net, rows, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


### BEGIN SOLUTION
def inner_loop(rows, labels, updates, lr):  # noqa: F811
    """The loss before each of the updates, which begin with new_net()."""
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr)
    losses = []
    for _ in range(updates):
        # The bug: autocast casts each weight once, and keeps the 16-bit copy to the end of
        # its block. A block for each forward casts the new weights.
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(net, rows, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


### END SOLUTION

# %%
with exercise.check("inner_loop", "the loss falls", points=2) as student:
    rows = torch.arange(32.0).reshape(8, 4).sin()
    labels = torch.arange(8) % 3
    losses = student.call("inner_loop", rows, labels, 4, 0.5)
    expected = inner_losses(rows, labels, 4, 0.5)
    what = "each loss is that of the weights after the updates before it, within 2%"
    student.close_to(losses, expected, what, rtol=0.02)

# %%
with exercise.check("inner_loop", "in bfloat16", points=2) as student:
    rows = torch.arange(32.0).reshape(8, 4).cos()
    labels = torch.arange(8) % 3
    losses = student.call("inner_loop", rows, labels, 4, 0.5)
    expected = inner_losses(rows, labels, 4, 0.5)
    what = "the losses are those of a bfloat16 forward with weights in 32 bit"
    student.close_to(losses, expected, what, rtol=1e-5)

# %%
with exercise.check("inner_loop", "other updates", points=2, hidden=True) as student:
    rows, labels = random_batch(student, student.random.randint(5, 12))
    updates = student.random.randint(6, 9)
    losses = student.call("inner_loop", rows, labels, updates, 0.3)
    expected = inner_losses(rows, labels, updates, 0.3)
    what = "with another number of updates, the losses are right"
    student.close_to(losses, expected, what, rtol=1e-5)

# %%
exercise.summary()
