# %% [markdown]
# # Exercises: DDP with mp.spawn
# 35 minutes, 20 points. Do lesson 04's notebook first. Run the cells from top to bottom, and
# write your answers in place of `# YOUR CODE HERE`.
#
# - The checks under a question call your functions and print a verdict for each statement.
#   When your notebook is graded, hidden checks also try other values.
# - The checks start a new process for each rank. It runs only the cells that begin with
#   `# given` or `# answer`. So write all that an answer needs, imports too, into its cell.
# - What would hang ends with a sentence, after 20 seconds at most.
#
# The questions do not depend on each other.

# %%
# setup
from multigpu.exercise import Exercise

exercise = Exercise("04-ddp-spawn")

# %%
# given
import multiprocessing
import os
import signal
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# %% [markdown]
# ## 1. Predict: a forgotten broadcast (2 points)
# Two ranks train a model of one weight w. The loss of each is w² / 2, so the gradient is w,
# and the best weight is 0. In each step the ranks average their gradients by an all-reduce,
# and subtract 0.5 × the average. But the program does not copy rank 0's weight to rank 1: rank
# 0 begins with 1, and rank 1 with 3. What is rank 0's weight after 100 steps?

# %%
# answer: guess_weight
guess_weight = None  # rank 0's weight; within 0.01 is right
### BEGIN SOLUTION
guess_weight = -1.0  # the mean goes from 2 to 0, and the ranks stay 2 apart
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_weight", "two weights, 100 steps", points=2) as student:
    weights = torch.tensor([1.0, 3.0])
    for _ in range(100):
        weights -= 0.5 * weights.mean()
    student.guess(
        "guess_weight",
        weights[0].item(),
        "this is rank 0's weight after 100 steps",
        "the experiment gives another one: compute two steps by hand, for both ranks",
        within=0.01,
    )

# %% [markdown]
# ## 2. Write: training with an all-reduce by hand (7 points)
# Write `train_by_hand(model, batches, lr)`, which runs on each rank, without DDP. `batches` is
# this rank's list of (rows, targets), one for each step. All ranks have the same number of
# steps, and the same number of rows in each. The loss is `F.mse_loss(model(rows), targets)`,
# and a step subtracts `lr` × the gradient (plain SGD).
#
# - When it returns, all ranks have the weights that one process has after the same steps with
#   the rows of all ranks, beginning with rank 0's weights.
# - The ranks may begin with different weights.
# - Each step sends each gradient once. `dist.all_reduce(tensor)` replaces a tensor by the sum
#   over the ranks, `dist.broadcast(tensor, src=0)` by rank 0's.
#
# A mistake often gives no error: each rank's loss falls, but each rank has another model, or
# the learning rate is too large by the number of ranks.


# %%
# given
def run_training(weight, bias, batches, lr):
    """Train on one rank, from this weight and bias. Returns those after the training."""
    model = nn.Linear(*weight.shape[::-1])
    model.weight.data = weight.clone()
    model.bias.data = bias.clone()
    train_by_hand(model, batches, lr)
    return {"weight": model.weight, "bias": model.bias}


# %%
# answer: train_by_hand
def train_by_hand(model: nn.Module, batches: list, lr: float) -> None:
    """Train on this rank; all ranks have the same weights afterwards."""
    ### BEGIN SOLUTION
    for weight in model.parameters():
        dist.broadcast(weight.data, src=0)
    for rows, targets in batches:
        model.zero_grad()
        F.mse_loss(model(rows), targets).backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.data -= lr * weight.grad / dist.get_world_size()
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
# setup
def random_layer(into, out, generator):
    """A weight and a bias."""
    return torch.randn(out, into, generator=generator), torch.randn(out, generator=generator)


def random_batches(steps, rows, into, out, generator):
    """A rank's batches."""
    return [
        (
            torch.randn(rows, into, generator=generator),
            torch.randn(rows, out, generator=generator),
        )
        for _ in range(steps)
    ]


def one_process(weight, bias, of_ranks, lr):
    """The weight and the bias after one process has trained with the rows of all ranks."""
    weight = weight.clone().requires_grad_()
    bias = bias.clone().requires_grad_()
    for batches in zip(*of_ranks, strict=True):
        rows, targets = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        F.mse_loss(F.linear(rows, weight, bias), targets).backward()
        with torch.no_grad():
            for each in (weight, bias):
                each -= lr * each.grad
                each.grad = None
    return {"weight": weight.detach(), "bias": bias.detach()}


# %%
with exercise.check("train_by_hand", "the same first weights", points=2) as student:
    layer = random_layer(3, 2, student.generator)
    batches = [random_batches(4, 5, 3, 2, student.generator) for _ in range(2)]
    run = student.ranks("run_training", [[*layer, own, 0.1] for own in batches])
    expected = one_process(*layer, batches, 0.1)
    student.close_to(run.values[0], expected, "rank 0 has the weights of one process")
    student.close_to(run.values[1], expected, "rank 1 has the weights of one process")

# %%
with exercise.check("train_by_hand", "other first weights on each rank", points=2) as student:
    layers = [random_layer(3, 2, student.generator) for _ in range(2)]
    batches = [random_batches(4, 5, 3, 2, student.generator) for _ in range(2)]
    arguments = [[*layer, own, 0.1] for layer, own in zip(layers, batches, strict=True)]
    run = student.ranks("run_training", arguments)
    expected = one_process(*layers[0], batches, 0.1)
    for rank, found in enumerate(run.values):
        statement = f"rank {rank} has the weights of one process that begins with rank 0's"
        student.close_to(found, expected, statement)

# %%
with exercise.check("train_by_hand", "what is sent", points=1) as student:
    layer = random_layer(4, 5, student.generator)
    batches = [random_batches(3, 2, 4, 5, student.generator) for _ in range(2)]
    run = student.ranks("run_training", [[*layer, own, 0.1] for own in batches])
    sent = [
        sum(call.bytes for call in calls if call.kind == "all_reduce") for calls in run.calls
    ]
    steps, gradients = 3, 4 * (4 * 5 + 5)
    student.expect(
        sent == [steps * gradients] * 2,
        "each step sends each gradient once",
        f"{steps} steps, gradients of {gradients} bytes: the ranks gave {sent} bytes to "
        f"all-reduces",
    )

# %%
with exercise.check("train_by_hand", "more ranks", points=2, hidden=True) as student:
    ranks = student.random.randint(3, 4)
    into, out = student.random.randint(2, 5), student.random.randint(1, 4)
    layer = random_layer(into, out, student.generator)
    steps, rows = student.random.randint(2, 5), student.random.randint(1, 4)
    batches = [random_batches(steps, rows, into, out, student.generator) for _ in range(ranks)]
    run = student.ranks("run_training", [[*layer, own, 0.05] for own in batches])
    expected = one_process(*layer, batches, 0.05)
    student.close_to(
        run.values, [expected] * ranks, "all ranks have the weights of one process", rtol=1e-4
    )

# %% [markdown]
# ## 3. Write: collect the results of ranks (7 points)
# Write `collect(function, n, path)`, a small `mp.spawn` that returns results. It calls
# `function(rank)` in n new processes at the same time, one for each rank. It saves the list of
# the n results, in the order of the ranks, by `torch.save` at `path`.
#
# - A file that is at `path` before stays complete until the new one is complete, so that a
#   reader never gets half a file: write under another name, then call `os.replace`.
# - If a rank raises an exception, or ends without a result, `collect` ends the other ranks at
#   once and raises a RuntimeError that names the rank, for example "rank 1 failed". It leaves
#   no new file in `path`'s folder, and no process.
# - Results may be large.
#
# `mp.spawn` cannot send functions of a cell (lesson 04's notebook shows it), so start the
# processes by fork: `multiprocessing.get_context("fork").Process(target=…, args=…)`. Useful:
# `multiprocessing.connection.wait([process.sentinel, …])` waits until one of several processes
# has ended. `process.exitcode` is 0 if it has ended without an error. (A fork cannot use a GPU
# if its parent has used one: with GPUs, new processes are started.)
#
# Mistakes here have these symptoms: a run in which a rank has failed keeps its GPUs for hours;
# the next program reads half a file; large results hang although small ones arrive.


# %% jupyter={"source_hidden": true}
# given
def slow_rank_0(rank):
    time.sleep(0.5 if rank == 0 else 0.0)
    return [rank * rank, os.getpid()]


def large(rank):
    return str(rank) * 200_000


def rank_1_raises(rank):
    if rank == 1:
        raise ValueError("a broken image")
    time.sleep(60)  # as a rank that waits in a collective


def last_is_killed(rank):
    time.sleep(0.2)
    if rank == 3:
        os._exit(9)  # as the kernel does when the memory is full
    time.sleep(60)


CASES = {f.__name__: f for f in (slow_rank_0, large, rank_1_raises, last_is_killed)}


class Timeout(Exception):  # no OSError, which `process.join` ignores
    pass


def too_late(*_):
    """The exception is raised where collect waits, so the check can name the line."""
    raise Timeout("collect has not returned after 10 s")


def run_collect(case, n, old=None):
    """Call collect in an empty folder, or in one with a file. Returns what it leaves."""
    signal.signal(signal.SIGALRM, too_late)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "results.pt")
        if old is not None:
            torch.save(old, path)
            os.link(path, os.path.join(folder, "old.pt"))  # as one who has opened the file
        error = None
        try:
            signal.alarm(10)
            collect(CASES[case], n, path)
        except NotImplementedError:  # a RuntimeError, too: there is no answer yet
            raise
        except RuntimeError as caught:
            error = str(caught)
        finally:
            signal.alarm(0)
        processes = multiprocessing.active_children()
        for process in processes:
            process.join(1)
        files = sorted(os.listdir(folder))
        contents = {
            name: torch.load(os.path.join(folder, name))
            for name in files
            if name.endswith(".pt")
        }
        return {
            "error": error,
            "files": files,
            "results": contents.get("results.pt"),
            "old": contents.get("old.pt"),
            "parent": os.getpid(),
            "processes": sum(process.is_alive() for process in processes),
        }


# %%
# answer: collect
def collect(function, n: int, path: str) -> None:
    """Call function(rank) in n processes, and save the list of the results at `path`."""
    ### BEGIN SOLUTION
    import multiprocessing.connection

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, str(rank)) for rank in range(n)]

        def work(rank):
            try:
                torch.save(function(rank), files[rank])
            except Exception as error:
                with open(files[rank], "w") as file:
                    file.write(f"{type(error).__name__}: {error}")
                raise SystemExit(1) from None  # the parent prints the reason

        processes = [context.Process(target=work, args=(rank,)) for rank in range(n)]
        for process in processes:
            process.start()
        running = {process.sentinel: rank for rank, process in enumerate(processes)}
        try:
            while running:
                for sentinel in multiprocessing.connection.wait(list(running)):
                    rank = running.pop(sentinel)
                    processes[rank].join()
                    if processes[rank].exitcode == 1:
                        with open(files[rank]) as file:
                            raise RuntimeError(f"rank {rank} failed: {file.read()}")
                    if processes[rank].exitcode != 0:
                        raise RuntimeError(f"rank {rank} ended without a result")
        finally:
            for process in processes:
                process.kill()
                process.join()
        results = [torch.load(file) for file in files]
    torch.save(results, f"{path}.new")
    os.replace(f"{path}.new", path)
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
# setup
def is_list(student, report, n):
    """Whether a list of n results is at `path`. The verdict says what else is there."""
    results = report["results"]
    reason = f"there is a {type(results).__name__}"
    if report["error"]:
        reason = f"collect raised RuntimeError: {report['error']}"
    elif results is None:
        reason = "there is no file"
    elif isinstance(results, list):
        reason = f"the list there has {len(results)} items"
    right = isinstance(results, list) and len(results) == n
    return student.expect(right, f"the list of the {n} results is at `path`", reason)


def names_rank(student, report, rank):
    """Whether a RuntimeError names the failed rank. Only then the rest is judged."""
    return student.expect(
        str(rank) in (report["error"] or ""),
        f"there is a RuntimeError that names rank {rank}",
        f"its text is {report['error']!r}" if report["error"] else "there is none",
    )


# %%
with exercise.check("collect", "the order of the ranks", points=1) as student:
    report = student.call("run_collect", "slow_rank_0", 3)
    if is_list(student, report, 3):
        squares = [square for square, _ in report["results"]]
        student.equal(squares, [0, 1, 4], "the results are in the order of the ranks")
        ids = {process for _, process in report["results"]} | {report["parent"]}
        student.expect(
            len(ids) == 4, "each rank is a new process", "two ran in the same process"
        )

# %%
with exercise.check("collect", "large results", points=1) as student:
    report = student.call("run_collect", "large", 2)
    if is_list(student, report, 2):
        lengths = [len(result) for result in report["results"]]
        student.equal(lengths, [200_000] * 2, "results of 200 kB arrive")

# %%
with exercise.check("collect", "a file that somebody reads", points=1) as student:
    report = student.call("run_collect", "large", 2, [1, 2, 3])
    if is_list(student, report, 2):
        student.expect(
            report["old"] == [1, 2, 3],
            "who has opened the old file still reads all of it",
            "the new results were written into it, so a reader can see half a file",
        )
        student.equal(report["files"], ["old.pt", "results.pt"], "no other file is left")

# %%
with exercise.check("collect", "rank 1 raises an exception", points=2) as student:
    report = student.call("run_collect", "rank_1_raises", 3)
    if names_rank(student, report, 1):
        student.equal(report["files"], [], "no file is left")
        student.equal(report["processes"], 0, "no process is left")

# %%
with exercise.check("collect", "a rank is killed", points=2, hidden=True) as student:
    ranks = student.random.randint(4, 5)
    report = student.call("run_collect", "last_is_killed", ranks, [7])
    if names_rank(student, report, 3):
        student.equal(report["results"], [7], "the file that was there stays")
        student.equal(report["files"], ["old.pt", "results.pt"], "no other file is left")
        student.equal(report["processes"], 0, "no process is left")

# %% [markdown]
# ## 4. Find the bugs: a port in use (4 points)
# The parent of n ranks starts them by a plan, a list of steps:
#
# - `("open", port)`: it opens the store at this port. At port 0, the system chooses a free
#   port, and the parent gives its number to the ranks that it starts.
# - `("start", rank)`: it starts a rank. The rank connects to the store, and uses it until the
#   rank ends. The ranks wait for each other before they train.
# - `("wait", rank)`: it waits until a rank has ended.
# - `("close",)`: it closes the store. From then on, any program may take the port.
#
# The plan below works for one user. When a second user starts it on the same machine, it ends
# with `Address already in use`. And sometimes, even with one user, the ranks end with
# `Connection refused`. Write `launch_plan(n)` without these bugs. The checks carry out the
# plan, beside other programs.


# %%
# given
def broken_plan(n):
    plan = [("open", 29500), ("close",)]  # an error if the port is in use
    plan += [("start", rank) for rank in range(n)]
    plan += [("wait", rank) for rank in range(n)]
    return plan


# %%
# answer: launch_plan
def launch_plan(n: int) -> list[tuple]:
    """The steps of the parent of n ranks."""
    ### BEGIN SOLUTION
    start = [("start", rank) for rank in range(n)]
    wait = [("wait", rank) for rank in range(n)]
    return [("open", 0), *start, *wait, ("close",)]
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
# setup
def port_problem(plan, busy):
    """The error of the first step that opens a port in use; "" if there is none."""
    for step in plan:
        if step[0] == "open" and step[1] != 0 and busy(step[1]):
            return f"port {step[1]}: Address already in use"
    return "" if any(step[0] == "open" for step in plan) else "no step opens a port"


def order_problem(plan, n):
    """What goes wrong although all ports are free; "" if nothing does."""
    is_open = False
    started, ended = set(), set()
    for step in plan:
        if step[0] == "open":
            is_open = True
        elif step[0] == "close":
            if started - ended:
                return f"rank {min(started - ended)} still uses the store when it is closed"
            is_open = False
        elif step[0] == "start":
            if not is_open:
                return f"rank {step[1]}: Connection refused, the store is not open"
            started.add(step[1])
        elif step[0] == "wait":
            missing = set(range(n)) - started
            if missing:
                return f"rank {step[1]} waits for rank {min(missing)}, which is not started"
            ended.add(step[1])
    unknown = [step for step in plan if step[0] not in ("open", "close", "start", "wait")]
    if unknown:
        return f"there is no step {unknown[0]!r}"
    if started != set(range(n)) or ended != started:
        return f"started were the ranks {sorted(started)}, waited for {sorted(ended)}"
    return ""


# %%
with exercise.check("launch_plan", "beside another program", points=1) as student:
    problem = port_problem(student.call("launch_plan", 2), lambda port: port == 29500)
    student.expect(not problem, "it runs while another program has port 29500", problem)

# %%
with exercise.check("launch_plan", "as long as the ranks run", points=2) as student:
    problem = order_problem(student.call("launch_plan", 2), 2)
    student.expect(
        not problem, "the ranks reach the store from their start to their end", problem
    )

# %%
with exercise.check(
    "launch_plan", "more ranks, more programs", points=1, hidden=True
) as student:
    ranks = student.random.randint(3, 9)
    plan = student.call("launch_plan", ranks)
    problem = port_problem(plan, lambda port: True)
    student.expect(not problem, "it runs whatever ports are in use", problem)
    problem = order_problem(plan, ranks)
    student.expect(not problem, "all ranks are started and waited for", problem)

# %% [markdown]
# ## Your points

# %%
exercise.summary()
