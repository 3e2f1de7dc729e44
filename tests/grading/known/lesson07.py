"""Known answers of lesson 07."""

from known import Known


def guesses(mean: float, synchronized_mean: float, variance: float | None) -> str:
    """An answer to the question guess_norm."""
    return f"""# answer: guess_norm
guess_mean = {mean}
guess_synchronized_mean = {synchronized_mean}
guess_synchronized_variance = {variance}
"""


LOSS = """
def replica_loss(losses, weights):
    return sum(a * b for a, b in zip(losses, weights))
"""


def weights(shards: str, weight: str, loss: str = LOSS) -> str:
    """An answer to sample_weights: the sizes of all shards, and an image's weight."""
    return f"""# answer: sample_weights
import numpy as np

def sample_weights(batch, replicas):
    size = -(-batch // replicas)
    shards = {shards}
    return [[{weight}] * shard for shard in shards]

{loss}
"""


FULL = "[max(0, min(size, batch - size * r)) for r in range(replicas)]"


def keras(
    kernel: str = "weight.permute(2, 3, 1, 0)",
    zeros: str = "padding",
    word: str = "valid",
    dense: str = "weight.reshape(-1, *image).permute(2, 3, 1, 0).reshape(-1, len(weight))",
) -> str:
    """An answer to to_keras."""
    return f"""# answer: to_keras
def conv(weight, padding):
    return {{"kernel": {kernel}, "zeros": {zeros}, "padding": "{word}"}}

def dense(weight, image):
    return {dense}
"""


def norm(statistics: str) -> str:
    """An answer to batch_norm; `statistics` assigns mean and variance."""
    return f"""# answer: batch_norm
def batch_norm(rows, moving_mean, moving_variance, momentum=0.9):
    c = rows.shape[1]
    world = dist.get_world_size()
{statistics}
    return (
        (rows - mean) / (variance + 1e-3).sqrt(),
        momentum * moving_mean + (1 - momentum) * mean,
        momentum * moving_variance + (1 - momentum) * variance,
    )
"""


EVEN, UNEVEN, SENT, OTHER = "even shards", "uneven shards", "what is sent", "other shards"

KNOWN = [
    # ---- guess_norm
    Known(
        "replica 0 has the whole batch's mean",
        "guess_norm",
        guesses(3.0, 3.0, 3.5),
        ("moving mean of replica 0",),
    ),
    Known(
        "each replica has its own mean",
        "guess_norm",
        guesses(1.5, 1.5, 3.5),
        ("moving mean, synchronized",),
    ),
    Known(
        "mean of the variances",
        "guess_norm",
        guesses(1.5, 3.0, 1.25),
        ("moving variance, synchronized",),
    ),
    Known(
        "one guess is missing",
        "guess_norm",
        guesses(1.5, 3.0, None),
        ("moving variance, synchronized",),
    ),
    # ---- sample_weights
    Known(
        "mean per replica",
        "sample_weights",
        weights(FULL, "1 / shard if shard else 0"),
        ("gradient under MirroredStrategy", "other batches"),
    ),
    Known(
        "divided by replicas",
        "sample_weights",
        weights(FULL, "1 / shard / replicas if shard else 0"),
        ("gradient under MirroredStrategy", "other batches"),
    ),
    Known(
        "shards of nearly one size",
        "sample_weights",
        weights("[len(s) for s in np.array_split(range(batch), replicas)]", "1 / batch"),
        ("sizes of the shards", "other batches"),
    ),
    Known(
        "at most four replicas",
        "sample_weights",
        weights(f"{FULL}[:4]", "1 / batch"),
        ("other batches",),
    ),
    Known(
        "the loss is a mean",
        "sample_weights",
        weights(
            FULL,
            "1 / batch",
            """
def replica_loss(losses, weights):
    return np.mean([a * b for a, b in zip(losses, weights)])
""",
        ),
        ("loss of a replica", "other batches"),
    ),
    Known(
        "tensors and a loop",
        "sample_weights",
        """# answer: sample_weights
import torch

def sample_weights(n, r):
    pieces = list(torch.full((n,), 1 / n, dtype=torch.float64).split((n + r - 1) // r))
    while len(pieces) < r:
        pieces.append(torch.zeros(0))
    return pieces

def replica_loss(l, w):
    return torch.tensor(l) @ torch.tensor(w)
""",
    ),
    # ---- to_keras
    Known(
        "height and width swapped",
        "to_keras",
        keras("weight.permute(3, 2, 1, 0)"),
        ("convolution, stride 1", "convolution, stride 2", "other convolutions"),
    ),
    Known(
        "the word same",
        "to_keras",
        keras(zeros="0", word="same"),
        ("convolution, stride 2", "other convolutions"),
    ),
    Known("always one row of zeros", "to_keras", keras(zeros="1"), ("other convolutions",)),
    Known(
        "zeros without end",
        "to_keras",
        keras(zeros="50_000"),
        ("convolution, stride 1", "convolution, stride 2", "other convolutions"),
    ),
    Known(
        "dense only transposed",
        "to_keras",
        keras(dense="weight.T"),
        ("dense after flatten", "other dense layers"),
    ),
    Known(
        "flatten of squares only",
        "to_keras",
        keras(
            dense="weight.reshape(len(weight), image[0], int((weight.shape[1] / image[0]) "
            "** 0.5), -1).permute(3, 2, 1, 0).transpose(0, 1).reshape(-1, len(weight)) "
            "if image[1] == image[2] else weight.T"
        ),
        ("other dense layers",),
    ),
    Known(
        "NumPy and loops",
        "to_keras",
        """# answer: to_keras
import numpy as np

def conv(weight, padding):
    w = np.asarray(weight)
    kernel = np.zeros((w.shape[2], w.shape[3], w.shape[1], w.shape[0]), np.float32)
    for o in range(w.shape[0]):
        for i in range(w.shape[1]):
            kernel[:, :, i, o] = w[o, i]
    return {"padding": "valid", "zeros": padding, "kernel": kernel}

def dense(weight, image):
    c, h, w = image
    order = np.arange(c * h * w).reshape(c, h, w).transpose(1, 2, 0).ravel()
    return np.asarray(weight).T[order]
""",
    ),
    # ---- batch_norm
    Known(
        "mean of the variances, uneven means",
        "batch_norm",
        """# answer: batch_norm
def batch_norm(rows, moving_mean, moving_variance):
    return broken_batch_norm(rows, moving_mean, moving_variance)
""",
        (EVEN, UNEVEN, SENT, OTHER),
    ),
    Known(
        "mean right, mean of the variances",
        "batch_norm",
        norm("""
    n = all_reduce(torch.tensor([float(len(rows))]))
    mean = all_reduce(rows.sum(0)) / n
    variance = all_reduce(rows.var(0, unbiased=False)) / world
"""),
        (EVEN, SENT, OTHER),
    ),
    Known(
        "shards of one size only",
        "batch_norm",
        norm("""
    mean = all_reduce(rows.mean(0)) / world
    variance = all_reduce((rows**2).mean(0)) / world - mean**2
"""),
        (UNEVEN, OTHER),
    ),
    Known(
        "one column only",
        "batch_norm",
        norm("""
    sums = all_reduce(torch.stack([torch.tensor(float(len(rows))), rows[:, 0].sum(),
                                   (rows[:, 0] ** 2).sum()]))
    mean = (sums[1] / sums[0]).reshape(1)
    variance = (sums[2] / sums[0]).reshape(1) - mean**2
"""),
        (OTHER,),
    ),
    Known(
        "all rows are sent",
        "batch_norm",
        norm("""
    sizes = torch.zeros(world)
    sizes[dist.get_rank()] = len(rows)
    sizes = all_reduce(sizes).long().tolist()
    everything = torch.zeros(sum(sizes), c)
    start = sum(sizes[: dist.get_rank()])
    everything[start : start + len(rows)] = rows
    everything = all_reduce(everything)
    mean = everything.mean(0)
    variance = everything.var(0, unbiased=False)
"""),
        (SENT,),
    ),
    Known(
        "only rank 0 calls all_reduce",
        "batch_norm",
        norm("""
    mean, variance = rows.mean(0), rows.var(0, unbiased=False)
    if dist.get_rank() == 0:
        mean = all_reduce(mean) / world
"""),
        (EVEN, UNEVEN, SENT, OTHER),
    ),
    Known(
        "three sums, distances from the mean",
        "batch_norm",
        norm("""
    n = torch.tensor([float(len(rows))])
    dist.all_reduce(n)
    mean = all_reduce(rows.sum(0)) / n
    variance = all_reduce(((rows - mean) ** 2).sum(0)) / n
"""),
    ),
]
