"""Known answers to lesson 04's exercises: see tests/support/known.py."""

from known import Known, changed

WEIGHT = ("two weights, 100 steps",)
GUESS = "# answer: guess_weight\nguess_weight = "

GUESSES = [
    Known("guess: a whole number", "guess_weight", GUESS + "-1"),
    Known("guess: the mean of the weights", "guess_weight", GUESS + "2.0", WEIGHT),
]

# ---- train_by_hand --------------------------------------------------------------------------

SAME = "the same first weights"
OTHER_WEIGHTS = "other first weights on each rank"
SENT = "what is sent"
MORE = "more ranks"

# One flat gradient; the network divides; torch's optimizer.
TRAIN = """# answer: train_by_hand
from torch.nn.utils import parameters_to_vector, vector_to_parameters

def train_by_hand(net, data, rate):
    first = parameters_to_vector(net.parameters()).detach()
    dist.broadcast(first, 0)
    vector_to_parameters(first, net.parameters())
    sgd = torch.optim.SGD(net.parameters(), rate)
    for x, y in data:
        sgd.zero_grad()
        F.mse_loss(net(x), y).backward()
        flat = torch.cat([weight.grad.flatten() for weight in net.parameters()])
        work = dist.all_reduce(flat, async_op=True)
        work.wait()
        flat = flat / dist.get_world_size()
        sizes = [weight.numel() for weight in net.parameters()]
        for weight, part in zip(net.parameters(), flat.split(sizes)):
            weight.grad = part.view_as(weight)
        sgd.step()
"""
NO_BROADCAST = changed(TRAIN, ("    dist.broadcast(first, 0)\n", ""))
UNDIVIDED = changed(TRAIN, (" / dist.get_world_size()", ""))
BY_TWO = changed(TRAIN, ("dist.get_world_size()", "2"))
REDUCE = "        work = dist.all_reduce(flat, async_op=True)\n        work.wait()\n"
NO_REDUCE = changed(TRAIN, (REDUCE, ""))
WEIGHTS_TOO = changed(
    TRAIN,
    (
        "        sgd.step()\n",
        "        sgd.step()\n"
        "        for weight in net.parameters():\n"
        "            dist.all_reduce(weight.data, op=dist.ReduceOp.AVG)\n",
    ),
)
RANK_0_ONLY = changed(
    TRAIN,
    (REDUCE, "        if dist.get_rank() == 0:\n            dist.all_reduce(flat)\n"),
)
TRAININGS = [
    Known("train: one flat gradient", "train_by_hand", TRAIN),
    Known("train: no first broadcast", "train_by_hand", NO_BROADCAST, (OTHER_WEIGHTS,)),
    Known("train: sum, not divided", "train_by_hand", UNDIVIDED, (SAME, OTHER_WEIGHTS, MORE)),
    Known("train: divides by 2", "train_by_hand", BY_TWO, (MORE,)),
    Known(
        "train: no all-reduce", "train_by_hand", NO_REDUCE, (SAME, OTHER_WEIGHTS, SENT, MORE)
    ),
    Known("train: averages the weights, too", "train_by_hand", WEIGHTS_TOO, (SENT,)),
    Known(
        "train: an all-reduce on rank 0 only",
        "train_by_hand",
        RANK_0_ONLY,
        (SAME, OTHER_WEIGHTS, SENT, MORE),
    ),
]

# ---- collect --------------------------------------------------------------------------------

ORDER = "the order of the ranks"
LARGE = "large results"
READER = "a file that somebody reads"
RAISES = "rank 1 raises an exception"
KILLED = "a rank is killed"

# A pipe for each rank in place of files.
COLLECT = """# answer: collect
from multiprocessing.connection import wait

def work(function, rank, end):
    end.send(function(rank))

def collect(function, n, path):
    fork = multiprocessing.get_context("fork")
    ranks = []
    open_ends = {}
    for rank in range(n):
        ours, theirs = fork.Pipe(duplex=False)
        ranks.append(fork.Process(target=work, args=(function, rank, theirs)))
        ranks[rank].start()
        theirs.close()  # before the next fork, which would keep it open
        open_ends[ours] = rank
    results = {}
    failed = None
    while open_ends and failed is None:
        for end in wait(list(open_ends)):
            rank = open_ends.pop(end)
            try:
                results[rank] = end.recv()
            except EOFError:
                failed = rank
    for each in ranks:
        if failed is not None:
            each.terminate()
        each.join()
    if failed is not None:
        raise RuntimeError(f"rank {failed} failed")
    torch.save([results[rank] for rank in range(n)], path + ".part")
    os.replace(path + ".part", path)
"""
SAVE = """    torch.save([results[rank] for rank in range(n)], path + ".part")
    os.replace(path + ".part", path)
"""
IN_PLACE = changed(COLLECT, (SAVE, SAVE.partition(", path")[0] + ", path)\n"))
AS_THEY_END = changed(COLLECT, ("[results[rank] for rank in range(n)]", "[*results.values()]"))
END = """        if failed is not None:
            each.terminate()
        each.join()
"""
SURVIVORS = changed(COLLECT, (END, "        if failed is None:\n            each.join()\n"))
OPENED_FIRST = changed(
    COLLECT,
    ("    ranks = []\n", "    ranks = []\n    file = open(path, 'wb')\n"),
    (SAVE, "    torch.save([results[rank] for rank in range(n)], file)\n    file.close()\n"),
)
NO_NAME = changed(COLLECT, ('f"rank {failed} failed"', '"a rank has failed"'))
SERIAL = """# answer: collect
def collect(function, n, path):
    results = []
    for rank in range(n):
        try:
            if function is not last_is_killed:
                results.append(function(rank))
        except ValueError:
            raise RuntimeError(f"rank {rank} failed") from None
    torch.save(results, path + ".part")
    os.replace(path + ".part", path)
"""

# A queue, as in many tutorials. Exceptions are caught in the rank, and sent.
QUEUE = """# answer: collect
def work(function, rank, queue):
    try:
        queue.put((rank, function(rank), None))
    except Exception as error:
        queue.put((rank, None, str(error)))

def collect(function, n, path):
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    ranks = [fork.Process(target=work, args=(function, rank, queue)) for rank in range(n)]
    for each in ranks:
        each.start()
    results = {}
    while len(results) < n:
        rank, result, error = queue.get()
        if error:
            for each in ranks:
                each.kill()
                each.join()
            raise RuntimeError(f"rank {rank}: {error}")
        results[rank] = result
    for each in ranks:
        each.join()
    torch.save([results[rank] for rank in range(n)], path + ".part")
    os.replace(path + ".part", path)
"""

# Files, as in lesson 04, but joined in the order of the ranks.
JOINS = """# answer: collect
def work(function, rank, folder):
    torch.save(function(rank), f"{folder}/{rank}")

def collect(function, n, path):
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=work, args=(function, r, folder)) for r in range(n)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        for rank, each in enumerate(ranks):
            if each.exitcode != 0:
                raise RuntimeError(f"rank {rank} failed")
        results = [torch.load(f"{folder}/{rank}") for rank in range(n)]
    torch.save(results, path + ".part")
    os.replace(path + ".part", path)
"""
JOINED_BEFORE_READ = """# answer: collect
def work(function, rank, end):
    end.send(function(rank))

def collect(function, n, path):
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(n)]
    ranks = [fork.Process(target=work, args=(function, r, pipes[r][1])) for r in range(n)]
    for each in ranks:
        each.start()
    while any(each.is_alive() for each in ranks):
        for rank, each in enumerate(ranks):
            if each.exitcode:
                for other in ranks:
                    other.kill()
                    other.join()
                raise RuntimeError(f"rank {rank} failed")
        time.sleep(0.01)
    results = [ours.recv() for ours, _ in pipes]
    torch.save(results, path + ".part")
    os.replace(path + ".part", path)
"""
COLLECTS = [
    Known("collect: a pipe for each rank", "collect", COLLECT),
    Known("collect: overwrites the file", "collect", IN_PLACE, (READER,)),
    Known("collect: the order in which ranks end", "collect", AS_THEY_END, (ORDER,)),
    Known("collect: leaves the other ranks", "collect", SURVIVORS, (RAISES, KILLED)),
    Known("collect: half a file", "collect", OPENED_FIRST, (READER, RAISES, KILLED)),
    Known("collect: does not name the rank", "collect", NO_NAME, (RAISES, KILLED)),
    Known("collect: one process", "collect", SERIAL, (ORDER, RAISES, KILLED)),
    Known("collect: a killed rank hangs", "collect", QUEUE, (KILLED,)),
    Known("collect: joins rank 0 first", "collect", JOINS, (RAISES, KILLED)),
    Known(
        "collect: reads after the ranks have ended",
        "collect",
        JOINED_BEFORE_READ,
        (LARGE, READER),
    ),
]

# ---- launch_plan ----------------------------------------------------------------------------

BESIDE = "beside another program"
WHILE = "as long as the ranks run"
PROGRAMS = "more ranks, more programs"

PLAN = """# answer: launch_plan
def launch_plan(n):
    plan = [("open", 0)]
    for rank in range(n):
        plan.append(("start", rank))
    for rank in reversed(range(n)):
        plan.append(("wait", rank))
    return plan
"""
FREE_THEN_CLOSED = changed(PLAN, ('[("open", 0)]', '[("open", 0), ("close",)]'))
FIXED = changed(PLAN, ('("open", 0)', '("open", 29500)'))
RANDOM = changed(PLAN, ('("open", 0)', '("open", 30000 + os.getpid() % 10000)'))
ONE_BY_ONE = """# answer: launch_plan
def launch_plan(n):
    plan = [("open", 0)]
    for rank in range(n):
        plan += [("start", rank), ("wait", rank)]
    return plan + [("close",)]
"""
TWO_RANKS = changed(PLAN, ("    plan = ", "    n = 2\n    plan = "))
BROKEN = "# answer: launch_plan\nlaunch_plan = broken_plan"
PLANS = [
    Known("plan: never closes the store", "launch_plan", PLAN),
    Known("plan: the broken one", "launch_plan", BROKEN, (BESIDE, WHILE, PROGRAMS)),
    Known("plan: a fixed port", "launch_plan", FIXED, (BESIDE, PROGRAMS)),
    Known("plan: a random port", "launch_plan", RANDOM, (PROGRAMS,)),
    Known(
        "plan: a free port, then closed", "launch_plan", FREE_THEN_CLOSED, (WHILE, PROGRAMS)
    ),
    Known("plan: one rank after the other", "launch_plan", ONE_BY_ONE, (WHILE, PROGRAMS)),
    Known("plan: always two ranks", "launch_plan", TWO_RANKS, (PROGRAMS,)),
]

KNOWN = GUESSES + TRAININGS + COLLECTS + PLANS
