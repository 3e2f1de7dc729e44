"""Known answers to lesson 05's exercises: see tests/support/known.py."""

from known import Known, changed

PADDED = ("10 images on 4 ranks",)
GUESS = "# answer: guess_accuracy\nguess_accuracy = "

GUESSES = [
    Known("guess: exactly", "guess_accuracy", GUESS + "100 * 10 / 12"),
    Known("guess: counts no image twice", "guess_accuracy", GUESS + "90", PADDED),
    Known("guess: a text", "guess_accuracy", GUESS + "'83.3%'", PADDED),
]

# ---- shard ----------------------------------------------------------------------------------

FIFTY = "50 rows on 4 ranks"
EPOCH = "another epoch"
OTHER_ROWS = "other numbers of rows"

SHARD = """# answer: shard
import random

def shard(n, ranks, rank, epoch):
    rows = list(range(n))
    random.Random(f"epoch {epoch}").shuffle(rows)
    size = (n + ranks - 1) // ranks
    rows = (rows * ranks)[: size * ranks]
    return rows[rank * size : (rank + 1) * size]
"""
SAMPLER = """# answer: shard
from torch.utils.data import DistributedSampler

def shard(n, ranks, rank, epoch):
    sampler = DistributedSampler(range(n), ranks, rank, seed=7)
    sampler.set_epoch(epoch)
    return list(sampler)
"""
NO_SET_EPOCH = changed(SAMPLER, ("    sampler.set_epoch(epoch)\n", ""))
SHUFFLE = '    random.Random(f"epoch {epoch}").shuffle(rows)\n'
PAD = "    rows = (rows * ranks)[: size * ranks]\n"
PART = "    return rows[rank * size : (rank + 1) * size]\n"
OWN_ROWS = changed(
    SHARD,
    (SHUFFLE, ""),
    (PART, PART.replace("return", "rows =") + SHUFFLE + "    return rows\n"),
)
ALL_ROWS = changed(SHARD, (PART, "    return rows\n"))
UNEQUAL = changed(SHARD, (PAD, ""), (PART, "    return rows[rank::ranks]\n"))
DROPPED = changed(SHARD, ("(n + ranks - 1) // ranks", "n // ranks"))
RANKS_SEED = changed(SHARD, ('f"epoch {epoch}"', "epoch + rank"))
ONCE_MORE = changed(SHARD, ("(rows * ranks)[: size * ranks]", "rows + rows[: -n % ranks]"))
TENSORS = """# answer: shard
def shard(n, ranks, rank, epoch):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
    return [order[place % n] for place in range(rank, -(-n // ranks) * ranks, ranks)]
"""
TOO_MANY = changed(SHARD, ("(n + ranks - 1) // ranks", "n // ranks + 1"))

SHARDS = [
    Known("shard: contiguous parts of one order", "shard", SHARD),
    Known("shard: with torch's sampler", "shard", SAMPLER),
    Known("shard: a list of tensors", "shard", TENSORS),
    Known("shard: no set_epoch", "shard", NO_SET_EPOCH, (EPOCH,)),
    Known("shard: each rank shuffles the same rows again", "shard", OWN_ROWS, (EPOCH,)),
    Known("shard: all rows on each rank", "shard", ALL_ROWS, (FIFTY, EPOCH, OTHER_ROWS)),
    Known("shard: unequal numbers of rows", "shard", UNEQUAL, (FIFTY, OTHER_ROWS)),
    Known("shard: drops the last rows", "shard", DROPPED, (FIFTY, OTHER_ROWS)),
    Known("shard: each rank has its own seed", "shard", RANKS_SEED, (FIFTY, OTHER_ROWS)),
    Known("shard: repeats a row at most once", "shard", ONCE_MORE, (OTHER_ROWS,)),
    Known("shard: repeats rows without need", "shard", TOO_MANY, (OTHER_ROWS,)),
]

# ---- my_ddp ---------------------------------------------------------------------------------

TWO = "two ranks"
UNEVEN = "5 and 2 rows"
LOG = "the log of a step"
MICRO = "three micro-batches"
SLOW = "a slow rank"
UNUSED = "a layer that rank 0 does not use"
THREE = "three ranks, other layers and buckets"
VALUES = (TWO, UNEVEN, MICRO, UNUSED, THREE)

# One buffer a bucket; counters in place of sets; the network divides.
DDP = """# answer: my_ddp
class Bucket:
    def __init__(self, weights):
        self.weights = weights
        self.flat = torch.zeros(sum(weight.numel() for weight in weights))
        self.missing = len(weights)
        self.work = None

class MyDDP:
    def __init__(self, model, bucket_bytes):
        self.ranks = dist.get_world_size()
        self.sends = False
        self.buckets = []
        group, size = [], 0
        for weight in list(model.parameters())[::-1]:
            dist.broadcast(weight.data, 0)
            group.append(weight)
            size += weight.numel() * 4
            if size >= bucket_bytes:
                self.buckets.append(Bucket(group))
                group, size = [], 0
        if group:
            self.buckets.append(Bucket(group))
        self.home = {weight: bucket for bucket in self.buckets for weight in bucket.weights}
        for weight in self.home:
            weight.register_post_accumulate_grad_hook(self.hook)

    def parts(self, bucket):
        parts = bucket.flat.split([weight.numel() for weight in bucket.weights])
        return zip(bucket.weights, parts)

    def begin(self, bucket):
        for weight, part in self.parts(bucket):
            if weight.grad is not None:
                part.copy_(weight.grad.flatten())
        bucket.work = dist.all_reduce(bucket.flat, op=dist.ReduceOp.AVG, async_op=True)

    def begin_rest(self):
        for bucket in self.buckets:
            if bucket.work is None:
                self.begin(bucket)

    def hook(self, weight):
        if self.sends:
            self.home[weight].missing -= 1
            for bucket in self.buckets:
                if bucket.missing:
                    break
                if bucket.work is None:
                    self.begin(bucket)

    def backward(self, losses, images, is_last):
        self.sends = is_last
        (losses.sum() * self.ranks / images).backward()
        if is_last:
            self.finish()

    def finish(self):
        self.begin_rest()
        for bucket in self.buckets:
            bucket.work.wait()
            for weight, part in self.parts(bucket):
                weight.grad = part.reshape(weight.shape).clone()
            bucket.missing = len(bucket.weights)
            bucket.work = None
"""
AVERAGE = "op=dist.ReduceOp.AVG, "
WAIT = "            bucket.work.wait()\n"
AFTER_BACKWARD = changed(DDP, ("if self.sends:", "if False:"))
FIRST_TO_LAST = changed(DDP, ("list(model.parameters())[::-1]", "list(model.parameters())"))
ONE_BUCKET = changed(DDP, ("if size >= bucket_bytes:", "if size >= 25 * 2**20:"))
BUCKET_A_WEIGHT = changed(DDP, ("if size >= bucket_bytes:", "if size:"))
EMPTY = changed(DDP, ("if weight.grad is not None:", "if False:"))
NO_WAIT = changed(DDP, (WAIT, ""))
WAITS_IN_HOOK = changed(DDP, ("async_op=True)", "async_op=True)\n        bucket.work.wait()"))
NO_NO_SYNC = changed(
    DDP, ("self.sends = is_last", "self.sends = True"), ("        if is_last:\n    ", "")
)
NEVER_SENT = changed(
    DDP,
    ("        self.begin_rest()\n", ""),
    (WAIT, "            if bucket.work is None:\n                continue\n" + WAIT),
)
OVERTAKES = changed(DDP, ("                    break\n", "                    continue\n"))
SUM = changed(DDP, (AVERAGE, ""))
BY_TWO = changed(DDP, (AVERAGE, ""), ("= part.reshape", "= (part / 2).reshape"))
OWN_MEAN = changed(DDP, ("losses.sum() * self.ranks / images", "losses.mean()"))
NO_BROADCAST = changed(DDP, ("            dist.broadcast(weight.data, 0)\n", ""))

DDPS = [
    Known("ddp: one buffer a bucket", "my_ddp", DDP),
    Known("ddp: all-reduces after backward", "my_ddp", AFTER_BACKWARD, (LOG, SLOW, THREE)),
    Known("ddp: buckets from first to last", "my_ddp", FIRST_TO_LAST, (LOG, SLOW, THREE)),
    Known("ddp: one bucket", "my_ddp", ONE_BUCKET, (LOG, MICRO, SLOW, THREE)),
    Known("ddp: a bucket a weight", "my_ddp", BUCKET_A_WEIGHT, (LOG, MICRO, THREE)),
    Known("ddp: sends an empty buffer", "my_ddp", EMPTY, (LOG, *VALUES)),
    Known("ddp: does not wait", "my_ddp", NO_WAIT, VALUES),
    Known("ddp: waits in the hook", "my_ddp", WAITS_IN_HOOK, (SLOW,)),
    Known("ddp: no no_sync", "my_ddp", NO_NO_SYNC, (MICRO, THREE)),
    Known("ddp: an unused layer hangs", "my_ddp", NEVER_SENT, (UNUSED,)),
    Known("ddp: a bucket overtakes another", "my_ddp", OVERTAKES, (UNUSED,)),
    Known("ddp: sum, not divided", "my_ddp", SUM, VALUES),
    Known("ddp: divides by 2", "my_ddp", BY_TWO, (THREE,)),
    Known("ddp: mean of the own rows", "my_ddp", OWN_MEAN, (UNEVEN, MICRO, THREE)),
    Known("ddp: no broadcast", "my_ddp", NO_BROADCAST, (TWO,)),
]

# ---- finish_epoch ---------------------------------------------------------------------------

LOSS = "the loss"
ACCURACY = "the accuracy"
NAMES = "the names of the weights"
FEW = "fewer test images than ranks"
SAME_MODEL = "the model stays as it was"
OTHER = "other numbers"
ALL = (LOSS, ACCURACY, FEW, NAMES, SAME_MODEL, OTHER)

# Two all-reduces, and no batches.
FINISH = """# answer: finish_epoch
@torch.no_grad()
def finish_epoch(ddp, losses, rows, labels):
    rank = dist.get_rank()
    total = torch.tensor([losses.double().sum(), float(losses.numel())])
    dist.all_reduce(total)
    net = ddp.module.eval()
    mine = list(range(len(rows)))[rank :: dist.get_world_size()]
    hits = (net(rows[mine]).argmax(1) == labels[mine]).double().sum()
    net.train()
    dist.all_reduce(hits)
    count = len(rows)
    report = {"accuracy": hits.item() / count, "loss": (total[0] / total[1]).item()}
    if rank == 0:
        report["weights"] = {name: value for name, value in net.state_dict().items()}
    return report
"""
BROKEN = "# answer: finish_epoch\nfinish_epoch = broken_finish_epoch"
RANK_0_ONLY = changed(
    FINISH,
    ("    dist.all_reduce(hits)\n", "    if rank == 0:\n        dist.all_reduce(hits)\n"),
)
MEAN_OF_MEANS = changed(
    FINISH, ("[losses.double().sum(), float(losses.numel())]", "[losses.mean(), 1.0]")
)
NO_LOSSES = changed(FINISH, ("losses.double().sum()", "losses.mean() * len(losses)"))
PADDING = changed(
    FINISH,
    (
        "list(range(len(rows)))[rank :: dist.get_world_size()]",
        "list(DistributedSampler(rows, shuffle=False))",
    ),
    ("count = len(rows)", "count = len(mine) * dist.get_world_size()"),
)
THROUGH_DDP = changed(
    FINISH,
    (
        "(net(rows[mine]).argmax(1) == labels[mine]).double().sum()",
        "torch.zeros(())\n    for row in mine:\n"
        "        hits += (ddp(rows[row : row + 1]).argmax(1) == labels[row]).sum()",
    ),
)
MODULE = changed(FINISH, ("net.state_dict()", "ddp.state_dict()"))
STAYS_IN_EVAL = changed(FINISH, ("    net.train()\n", ""))
DRIFT = changed(FINISH, ("ddp.module.eval()", "ddp.module"))

PART = "list(range(len(rows)))[rank :: dist.get_world_size()]"
EACH_ALL = changed(
    FINISH, (PART, "list(range(len(rows)))"), ("    dist.all_reduce(hits)\n", "")
)
ARRAYS = changed(FINISH, ("hits.item() / count", "(hits / count).numpy()"))

REPORTS = [
    Known("finish: an array of shape ()", "finish_epoch", ARRAYS),
    Known("finish: each rank computes all images", "finish_epoch", EACH_ALL, (ACCURACY,)),
    Known("finish: two all-reduces, no batches", "finish_epoch", FINISH),
    Known("finish: the broken program", "finish_epoch", BROKEN, ALL),
    Known("finish: a collective on rank 0 only", "finish_epoch", RANK_0_ONLY, ALL),
    Known("finish: mean of the ranks' means", "finish_epoch", MEAN_OF_MEANS, (LOSS, OTHER)),
    Known("finish: mean of no losses", "finish_epoch", NO_LOSSES, (OTHER,)),
    Known("finish: padding is counted", "finish_epoch", PADDING, (ACCURACY, FEW, OTHER)),
    Known("finish: batches through DDP", "finish_epoch", THROUGH_DDP, (FEW, OTHER)),
    Known("finish: names with module.", "finish_epoch", MODULE, (NAMES,)),
    Known("finish: stays in eval mode", "finish_epoch", STAYS_IN_EVAL, (SAME_MODEL,)),
    Known("finish: BatchNorm drifts", "finish_epoch", DRIFT, (FEW, SAME_MODEL, OTHER)),
]

KNOWN = GUESSES + SHARDS + DDPS + REPORTS
