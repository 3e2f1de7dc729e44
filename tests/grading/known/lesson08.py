"""Known answers of lesson 08."""

from known import Known


def guesses(steps: object, different: object, together: object) -> str:
    """An answer to the question guess_reading."""
    return f"""# answer: guess_reading
guess_steps = {steps}
guess_different = {different}
guess_together = {together}
"""


def config(
    port: str = "20_000 + 16 * (job % 1_000) + hosts[:place].count(host)",
    hosts: str = "hosts",
    index: str = "rank",
    result: str = "json.dumps(config)",
) -> str:
    """An answer to tf_config."""
    return f"""# answer: tf_config
import json

def tf_config(hosts, rank, job):
    workers = []
    for place, host in enumerate({hosts}):
        workers.append(f"{{host}}:{{{port}}}")
    task = {{"type": "worker", "index": {index}}}
    config = {{"cluster": {{"worker": workers}}, "task": task}}
    return {result}
"""


INDEX, NODES, WORKERS = "index", "order of the nodes", "two workers on a node"
JOBS, OTHER_NODES = "two jobs on a node", "other nodes and jobs"


def read(body: str) -> str:
    """An answer to read."""
    return f"""# answer: read
def read(order, batch, workers, worker):
    size = batch // workers
    steps = []
{body}
    return steps
"""


EVEN, LAST, OTHER = "even batches", "a smaller last batch", "other numbers"


def train(before: str, numbers: str, divided_by: str = "total[1]", after: str = "") -> str:
    """An answer to train: what each worker does for its steps."""
    return f"""# answer: train
def train(w, batches, rate):
    weights = []
    steps = torch.tensor(len(batches))
{before}
    for step in range(int(steps)):
        numbers = {numbers}
        count = torch.tensor(float(len(numbers)))
        total = torch.stack([(2 * (w - numbers)).sum(), count])
        dist.all_reduce(total)
        w = w - rate * total[0] / {divided_by}
        weights.append(w)
{after}
    return weights
"""


NEXT = """    counts = [torch.zeros_like(steps) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, steps)
    steps = max(steps, counts[(dist.get_rank() + 1) % len(counts)])"""
EQUAL, MORE, OTHER_WORKERS = (
    "equal numbers of batches, or none",
    "one batch more",
    "other workers",
)
MOST = "    dist.all_reduce(steps, dist.ReduceOp.MAX)"
OWN = "batches[step] if step < len(batches) else torch.zeros(0)"

KNOWN = [
    # ---- guess_reading
    Known(
        "OFF as AUTO",
        "guess_reading",
        guesses(3, 8, 14),
        ("steps without sharding", "different images in a step"),
    ),
    Known(
        "OFF reads different images",
        "guess_reading",
        guesses(6, 8, 14),
        ("different images in a step",),
    ),
    Known(
        "the last batch forgotten",
        "guess_reading",
        guesses(6, 4, 13),
        ("unequal numbers of batches",),
    ),
    Known(
        "a text for a number",
        "guess_reading",
        guesses(6, 4, '"14"'),
        ("unequal numbers of batches",),
    ),
    # ---- tf_config
    Known("n10 before n2", "tf_config", config(hosts="sorted(hosts)"), (NODES, OTHER_NODES)),
    Known(
        "each node once",
        "tf_config",
        config(hosts="dict.fromkeys(hosts)"),
        (WORKERS, OTHER_NODES),
    ),
    Known("index as text", "tf_config", config(index="str(rank)"), (INDEX, OTHER_NODES)),
    Known("index from 1", "tf_config", config(index="rank + 1"), (INDEX, OTHER_NODES)),
    Known(
        "a dict, not a text",
        "tf_config",
        config(result="config"),
        (INDEX, NODES, WORKERS, JOBS, OTHER_NODES),
    ),
    Known("a fixed port", "tf_config", config("12345"), (WORKERS, JOBS, OTHER_NODES)),
    Known(
        "the same ports in each job", "tf_config", config("12345 + place"), (JOBS, OTHER_NODES)
    ),
    Known(
        "neighbouring jobs overlap",
        "tf_config",
        config("10_000 + job % 1_000 + place"),
        (JOBS, OTHER_NODES),
    ),
    Known(
        "the rank is in the ports",
        "tf_config",
        config("20_000 + 16 * (job % 1_000) + place + 100 * rank"),
        (NODES, OTHER_NODES),
    ),
    Known(
        "ports above 65535", "tf_config", config("10_000 + 2 * job + place"), (OTHER_NODES,)
    ),
    Known(
        "few jobs",
        "tf_config",
        config("10_000 + 16 * (job % 100) + hosts[:place].count(host)"),
        (OTHER_NODES,),
    ),
    Known(
        "a text by hand",
        "tf_config",
        """# answer: tf_config
from collections import Counter

def tf_config(hosts, rank, job):
    seen = Counter()
    found = []
    for host in hosts:
        found.append('"%s:%d"' % (host, 1024 + 16 * (job % 4_000) + seen[host]))
        seen[host] += 1
    return ('{"task": {"index": %d, "type": "worker"}, "cluster": {"worker": [%s]}}'
            % (rank, ", ".join(found)))
""",
    ),
    # ---- read
    Known(
        "OFF: all workers read all",
        "read",
        read("""
    for start in range(0, len(order), size):
        steps.append([(image, 1 / batch) for image in order[start : start + size]])
"""),
        (EVEN, LAST, OTHER),
    ),
    Known(
        "the full batch's weight",
        "read",
        read("""
    for start in range(0, len(order), batch):
        images = order[start : start + batch]
        pairs = [(image, 1 / batch) for image in images]
        pairs += [(order[0], 0.0)] * (batch - len(images))
        steps.append(pairs[size * worker : size * (worker + 1)])
"""),
        (LAST, OTHER),
    ),
    Known(
        "padding counts",
        "read",
        read("""
    for start in range(0, len(order), batch):
        images = order[start : start + batch]
        images = images + order[: batch - len(images)]
        pairs = [(image, 1 / batch) for image in images]
        steps.append(pairs[size * worker : size * (worker + 1)])
"""),
        (LAST, OTHER),
    ),
    Known(
        "steps of its own",
        "read",
        read("""
    own = order[worker::workers]
    for start in range(0, len(own), size):
        images = own[start : start + size]
        number = min(batch, len(order) - start * workers)
        pairs = [(image, 1 / number) for image in images]
        steps.append(pairs + [(own[0], 0.0)] * (size - len(images)))
"""),
        (OTHER,),
    ),
    Known(
        "every n-th image",
        "read",
        """# answer: read
import numpy as np

def read(o, b, ws, w):
    n = -(-len(o) // b)
    padded = np.resize(np.array(o), n * b)
    place = np.arange(n * b)
    weights = (place < len(o)) / np.minimum(b, len(o) - place // b * b)
    both = list(zip(padded.tolist(), weights.tolist()))[w::ws]
    return [both[k * (b // ws) : (k + 1) * (b // ws)] for k in range(n)]
""",
    ),
    # ---- train
    Known(
        "steps of its own batches",
        "train",
        """# answer: train
def train(w, batches, rate):
    return broken_train(w, batches, rate)
""",
        (EQUAL, MORE, OTHER_WORKERS),
    ),
    Known(
        "as many steps as the worker with the fewest",
        "train",
        train("    dist.all_reduce(steps, dist.ReduceOp.MIN)", "batches[step]"),
        (EQUAL, MORE, OTHER_WORKERS),
    ),
    Known(
        "divided by the own numbers",
        "train",
        train(MOST, OWN, "(dist.get_world_size() * max(1, len(numbers)))"),
        (EQUAL, MORE, OTHER_WORKERS),
    ),
    Known(
        "the empty batch is made from the first one",
        "train",
        train(MOST, "batches[step] if step < len(batches) else batches[0][:0]"),
        (EQUAL, OTHER_WORKERS),
    ),
    Known(
        "as many steps as itself or the next worker",
        "train",
        train(NEXT, OWN),
        (OTHER_WORKERS,),
    ),
    Known(
        "the numbers are sent",
        "train",
        """# answer: train
def train(w, batches, rate):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    weights = []
    for step in range(int(steps)):
        own = torch.full((100,), float("nan"))
        if step < len(batches):
            own[: len(batches[step])] = batches[step]
        everything = [torch.zeros(100) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, own)
        numbers = torch.cat(everything)
        w = w - rate * (2 * (w - numbers[~numbers.isnan()])).mean()
        weights.append(w)
    return weights
""",
        (MORE,),
    ),
    Known(
        "who goes on is asked in each step",
        "train",
        """# answer: train
def train(start, own, lr):
    found, left = [], list(own)
    while True:
        x = left.pop(0) if left else torch.zeros(0)
        sums = torch.tensor([2 * (start - x).sum(), len(x)])
        dist.all_reduce(sums)
        if sums[1] == 0:
            return found
        start = start - lr * sums[0] / sums[1]
        found.append(start)
""",
    ),
]
