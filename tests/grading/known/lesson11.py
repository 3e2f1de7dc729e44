"""Known answers of lesson 11."""

from known import Known

STEP = """# answer: scaled_step
def scaled_step(loss, net, optimizer, state, max_norm):
"""
BACKWARD = """    (loss * state["scale"]).backward()
    gradients = [weight.grad for weight in net.parameters()]
"""
SKIP = """    if not all(gradient.isfinite().all() for gradient in gradients):
        state["scale"] /= 2
        state["good"] = 0
        return
"""
UNSCALE = """    for gradient in gradients:
        gradient /= state["scale"]
"""
CLIP = """    nn.utils.clip_grad_norm_(net.parameters(), max_norm)
"""
APPLY = """    optimizer.step()
"""
GROW = """    state["good"] += 1
    if state["good"] == state["patience"]:
        state["scale"] *= 2
        state["good"] = 0
"""
SMALL = "small gradients"
OVERFLOW = "overflow"
CLIPPED = "clipping"
OUTLIERS = "outliers"

BYTES = """# answer: bytes_needed
def bytes_needed(n, optimizer, precision):
"""
EXACT = "32 bit"
MIXED = "mixed precision"
MODELS = "other models"

INNER = """# answer: inner_loop
def inner_loop(rows, labels, updates, lr):
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr)
    losses = []
"""
FALLS = "the loss falls"
BFLOAT16 = "in bfloat16"
UPDATES = "other updates"

KNOWN = [
    Known(
        "the scale never grows",
        "guess_scale",
        "# answer: guess_scale\nguess_scale = 8192\n",
        ("the scale of torch's GradScaler",),
    ),
    Known(
        "no number",
        "guess_scale",
        "# answer: guess_scale\nguess_scale = [32768, 65536]\n",
        ("the scale of torch's GradScaler",),
    ),
    # ---- scaled_step ------------------------------------------------------------------------
    Known(
        "updates with infinite gradients",
        "scaled_step",
        STEP
        + BACKWARD
        + """    finite = all(gradient.isfinite().all() for gradient in gradients)
"""
        + UNSCALE
        + CLIP
        + APPLY
        + """    state["good"] += 1
    if not finite:
        state["scale"] /= 2
        state["good"] = 0
    elif state["good"] == state["patience"]:
        state["scale"] *= 2
        state["good"] = 0
""",
        (OVERFLOW, OUTLIERS),
    ),
    Known(
        "clips before it unscales",
        "scaled_step",
        STEP + BACKWARD + SKIP + CLIP + UNSCALE + APPLY + GROW,
        (CLIPPED, OUTLIERS),
    ),
    Known(
        "does not unscale",
        "scaled_step",
        STEP + BACKWARD + SKIP + CLIP + APPLY + GROW,
        (SMALL, OVERFLOW, OUTLIERS),
    ),
    Known(
        "does not clip",
        "scaled_step",
        STEP + BACKWARD + SKIP + UNSCALE + APPLY + GROW,
        (CLIPPED,),
    ),
    Known(
        "looks at the loss for infinity",
        "scaled_step",
        STEP
        + BACKWARD
        + """    if not loss.isfinite():
        state["scale"] /= 2
        state["good"] = 0
        return
"""
        + UNSCALE
        + CLIP
        + APPLY
        + GROW,
        (OVERFLOW, OUTLIERS),
    ),
    Known(
        "puts zero in place of infinite gradients",
        "scaled_step",
        STEP
        + BACKWARD
        + """    if not all(gradient.isfinite().all() for gradient in gradients):
        state["scale"] /= 2
        state["good"] = 0
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        return
"""
        + UNSCALE
        + CLIP
        + APPLY
        + GROW,
        (OVERFLOW, OUTLIERS),
    ),
    Known(
        "the scale never rises",
        "scaled_step",
        STEP + BACKWARD + SKIP + UNSCALE + CLIP + APPLY,
        (OUTLIERS,),
    ),
    Known(
        "an overflow does not set the counter back",
        "scaled_step",
        STEP
        + BACKWARD
        + """    if not all(gradient.isfinite().all() for gradient in gradients):
        state["scale"] /= 2
        return
"""
        + UNSCALE
        + CLIP
        + APPLY
        + GROW,
        (OUTLIERS,),
    ),
    Known(
        "scales the clipping norm in place of the gradients' copies",
        "scaled_step",
        STEP
        + """    weights = list(net.parameters())
    found = torch.autograd.grad(loss * state["scale"], weights)
    norm = torch.cat([each.flatten() for each in found]).double().norm() / state["scale"]
    if norm.isinf() or norm.isnan():
        state.update(scale=state["scale"] * 0.5, good=0)
    else:
        shrink = min(1.0, max_norm / (norm.item() + 1e-6)) / state["scale"]
        for weight, gradient in zip(weights, found):
            weight.grad = gradient * shrink
        optimizer.step()
        grown = state["good"] + 1 == state["patience"]
        state["good"] = 0 if grown else state["good"] + 1
        state["scale"] *= 1 + grown
""",
    ),
    # ---- bytes_needed -----------------------------------------------------------------------
    Known(
        "forgets the 16-bit copies",
        "bytes_needed",
        BYTES
        + """    each = 2 if precision == "bf16-true" else 4
    return n * each * {"SGD": 2, "momentum": 3, "Adam": 4}[optimizer]
""",
        (MIXED, MODELS),
    ),
    Known(
        "Adam as SGD with momentum",
        "bytes_needed",
        BYTES
        + """    each = 2 if precision == "bf16-true" else 4
    copies = 2 if precision.endswith("mixed") else 0
    return n * (each * (2 if optimizer == "SGD" else 3) + copies)
""",
        (EXACT, MODELS),
    ),
    Known(
        "forgets the gradients",
        "bytes_needed",
        BYTES
        + """    each = 2 if precision == "bf16-true" else 4
    copies = 2 if precision.endswith("mixed") else 0
    return n * (each * {"SGD": 1, "momentum": 2, "Adam": 3}[optimizer] + copies)
""",
        (EXACT, MIXED, MODELS),
    ),
    Known(
        "the optimizer of bf16-true in 32 bit",
        "bytes_needed",
        BYTES
        + """    each = 2 if precision == "bf16-true" else 4
    copies = 2 if precision.endswith("mixed") else 0
    states = {"SGD": 0, "momentum": 1, "Adam": 2}[optimizer]
    return n * (2 * each + 4 * states + copies)
""",
        (MODELS,),
    ),
    Known(
        "a table of bytes",
        "bytes_needed",
        "# answer: bytes_needed\n"
        'TABLE = {"32-true": (8, 12, 16), "16-mixed": (10, 14, 18), "bf16-true": (4, 6, 8)}\n'
        'TABLE["bf16-mixed"] = TABLE["16-mixed"]\n\n\n'
        + BYTES.partition("\n")[2]
        + """    column = ["SGD", "momentum", "Adam"].index(optimizer)
    return float(TABLE[precision][column]) * n
""",
    ),
    # ---- inner_loop -------------------------------------------------------------------------
    Known(
        "the cache of autocast",
        "inner_loop",
        INNER
        + """    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(updates):
            loss = loss_of(net, rows, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
""",
        (FALLS, BFLOAT16, UPDATES),
    ),
    Known(
        "without autocast",
        "inner_loop",
        INNER
        + """    for _ in range(updates):
        loss = loss_of(net, rows, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
""",
        (BFLOAT16, UPDATES),
    ),
    Known(
        "a new net for each update",
        "inner_loop",
        INNER
        + """    for _ in range(updates):
        net = new_net()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(net, rows, labels)
        net.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
""",
        (FALLS, BFLOAT16, UPDATES),
    ),
    Known(
        "a block for four updates",
        "inner_loop",
        INNER
        + """    for update in range(min(4, updates)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(net, rows, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses + losses[-1:] * (updates - 4)
""",
        (UPDATES,),
    ),
    Known(
        "switches the cache off",
        "inner_loop",
        INNER
        + """    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        while len(losses) < updates:
            net.zero_grad()
            loss = loss_of(net, rows, labels)
            loss.backward()
            optimizer.step()
            losses += [float(loss)]
    return losses
""",
    ),
]
