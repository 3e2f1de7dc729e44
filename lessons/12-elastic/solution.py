# %% [markdown]
# # Exercises: elastic training
# 40 minutes, 20 points. Do the notebook of lesson 12 first. No GPU. Run the cells from top to
# bottom, and write your answers in place of `# YOUR CODE HERE`.
#
# - The checks under a question call your functions and print a verdict for each statement.
#   When your notebook is graded, hidden checks also try other values.
# - The checks start new processes. They run only the cells that begin with `# given` or
#   `# answer`. So write all that an answer needs, imports too, into its cell.
#
# The questions do not depend on each other. Question 2 takes the most time.

# %% jupyter={"source_hidden": true}
# setup
from collections import Counter

from torch.distributed.elastic.utils.data import ElasticDistributedSampler

from multigpu.errors import pluralize
from multigpu.exercise import Exercise
from multigpu.exercise.check import UNANSWERED
from multigpu.exercise.session import StudentError

exercise = Exercise("12-elastic", seconds=5)


def lost_images(images, done):
    """The images that no rank sees: 2 ranks see the first `done` ones, 3 ranks the rest."""
    seen = Counter()
    for rank in range(2):
        sampler = ElasticDistributedSampler(range(images), 2, rank)
        seen.update(list(sampler)[: done // 2])
    for rank in range(3):
        seen.update(ElasticDistributedSampler(range(images), 3, rank, start_index=done))
    return images - len(seen)


def lost_hint(guess):
    """A hint that fits the guess of question 1."""
    if guess == 0:
        return "are the images 600 to 799 those that the two ranks have not seen?"
    if guess == 200:
        return "200 images are left, but some of them have numbers from 600 on"
    return "the first 600 images of a shuffled order are not those with the numbers 0 to 599"


def all_shards(student, order, done, batch, ranks):
    """What `shards` returns on each rank, as a list of steps for each rank."""
    return [student.call("shards", order, done, batch, rank, ranks) for rank in range(ranks)]


def real(row):
    return [image for image in row if image != -1]


def wrong_steps(shares, done, wanted):
    """What is wrong with the number of steps, or ""."""
    for rank, share in enumerate(shares):
        if len(share) != len(wanted):
            left = sum(len(images) for images in wanted)
            return (
                f"{done} images are done and {left} left, that is "
                f"{pluralize(len(wanted), 'step')}; rank {rank} makes {len(share)}"
            )
    return ""


def wrong_length(step, images, rows):
    """What is wrong with the length of a step's rows, or ""."""
    length = -(-len(images) // len(rows))
    for rank, row in enumerate(rows):
        if len(row) != length:
            return (
                f"step {step} has {pluralize(len(images), 'image')} for {len(rows)} ranks, so "
                f"a row has {pluralize(length, 'place')}; that of rank {rank} is {row}"
            )
    return ""


def wrong_images(step, images, rows, before):
    """What is wrong with the images of a step, or ""; `before` are those of earlier steps."""
    at = {}
    for rank, row in enumerate(rows):
        for image in real(row):
            at.setdefault(image, []).append(rank)
    for image, places in at.items():
        if image not in images:
            when = "an earlier batch" if image in before else "a later batch"
            return f"in step {step}, rank {places[0]} has image {image}, which is of {when}"
        if len(places) > 1:
            where = ", ".join(map(str, places))
            return f"in step {step}, image {image} is on ranks {where}"
    for image in images:
        if image not in at:
            return f"in step {step}, no rank has image {image}"
    return ""


def expect_shards(student, order, done, batch, ranks, case=""):
    """Verdicts about all steps from `done` to the end of the epoch, which begin with `case`.

    Each names the first mistake. Rows and images are looked at in the steps that all make.
    """
    shares = all_shards(student, order, done, batch, ranks)
    rest = order[done:]
    wanted = [rest[at : at + batch] for at in range(0, len(rest), batch)]
    lengths = images = ""
    made = min(len(share) for share in shares)
    for step, expected in enumerate(wanted[:made]):
        rows = [share[step] for share in shares]
        seen = order[: done + step * batch]
        lengths = lengths or wrong_length(step, expected, rows)
        images = images or wrong_images(step, expected, rows, seen)
    steps = wrong_steps(shares, done, wanted)
    student.expect(not steps, f"{case}each rank makes one step for each batch", steps)
    student.expect(not lengths, f"{case}the rows of a step have the right length", lengths)
    student.expect(not images, f"{case}each image of a batch is on one rank, once", images)


class Disk:
    """A disk in a machine whose power can be cut."""

    def __init__(self):
        self.files = {}  # name → [text, whether all of it is on the disk]

    def run(self, plan):
        for operation, name, *more in plan:
            if operation != "write" and name not in self.files:
                raise ValueError(f"{operation} {name!r}: there is no such file then")
            if operation == "write":
                self.files[name] = [more[0], False]
            elif operation == "sync":
                self.files[name][1] = True
            elif operation == "rename":
                self.files[more[0]] = self.files.pop(name)
            elif operation == "remove":
                del self.files[name]
            else:
                raise ValueError(f"no operation is called {operation!r}")

    def cut(self):
        """Of a file without sync, half of the text is there when the power is back."""
        for file in self.files.values():
            if not file[1]:
                file[:] = [file[0][: len(file[0]) // 2], True]
        return self

    def copy(self):
        other = Disk()
        other.files = {name: list(file) for name, file in self.files.items()}
        return other

    def texts(self):
        return {name: text for name, (text, _) in self.files.items()}


def checkpoint(student, step):
    """What is saved at a step: two texts that no other step has."""
    letters = [chr(student.random.randint(97, 122)) for _ in range(24)]
    return [step, "".join(letters[:12]), "".join(letters[12:])]


def loaded(student, disk):
    """(what load returns for the files of the disk, how it stopped or "")."""
    try:
        content = student.call("load", disk.texts())
    except StudentError as error:
        if error.kind == UNANSWERED:
            raise
        return None, f"load stops with {error}"
    return None if content is None else list(content), ""


def expect_loaded(student, disk, content, what):
    """A verdict: load returns `content` for this disk."""
    got, stopped = loaded(student, disk)
    why = stopped or f"load returns {got}"
    student.expect(not stopped and got == content, what, f"{why}; files: {disk.texts()}")


def plan_of(student, content):
    """The operations of a save, as the student's save_plan lists them."""
    return [list(operation) for operation in student.call("save_plan", *content)]


def saved(student, disk, content, operations=None):
    """A copy of the disk after the first `operations` of a save, and a power cut."""
    plan = plan_of(student, content)
    after = disk.copy()
    after.run(plan if operations is None else plan[:operations])
    return after.cut()


def last_of(student, content, done):
    """Where the power is cut, for a verdict."""
    if not done:
        return "before the first operation"
    operation, name, *_ = plan_of(student, content)[done - 1]
    return f"after operation {done}, {operation} {name!r}"


def moments(student, content):
    """After how many operations of this save the power can be cut before its end."""
    return range(len(student.call("save_plan", *content)))


def expect_whole(student, disk, old, new, what):
    """A verdict: if the power is cut in the save of `new`, there is all of it or of `old`."""
    wrong = ""
    for done in moments(student, new):
        after = saved(student, disk, new, done)
        got, stopped = loaded(student, after)
        if not wrong and (stopped or got not in (old, new)):
            why = stopped or f"load returns {got}"
            wrong = f"cut {last_of(student, new, done)}: {why}; files: {after.texts()}"
    got, stopped = loaded(student, saved(student, disk, new))
    if not wrong and got != new:
        wrong = f"after a whole save: {stopped or f'load returns {got} and not {new}'}"
    student.expect(not wrong, what, wrong)


def expect_stop(student, signals, expected):
    """A verdict: all ranks stop in this step, for this signal. A row of `signals` per rank."""
    names = ("no signal", "USR1", "TERM")

    def said(stop):
        known = isinstance(stop[1], int) and 0 <= stop[1] < 3
        return f"makes {stop[0]} steps and stops for {names[stop[1]] if known else stop[1]}"

    run = student.ranks("train", [[row] for row in signals])
    wrong = ""
    for rank, stop in enumerate(run.values):
        if not wrong and list(stop) != expected:
            wrong = f"rank {rank} {said(stop)}; expected: it {said(expected)}"
    what = "no rank stops" if expected[1] == 0 else f"all ranks stop for {names[expected[1]]}"
    student.expect(not wrong, f"{what}, after the same step", wrong)


# %%
# given
import torch
import torch.distributed as dist

NOTHING, USR1, TERM = 0, 1, 2  # what a rank has received


def train(received):
    """Question 4 on one rank: received[s] is what it has received when step s ends.

    Returns the steps that it has made, and why it stops.
    """
    for step, signal in enumerate(received):
        reason = int(agree(signal))
        if reason != NOTHING:
            return [step + 1, reason]
    return [len(received), NOTHING]


# %% [markdown]
# ## 1. Predict: what the sampler loses (3 points)
# An epoch has 800 images. Two ranks see 600 of them with PyTorch's
# `ElasticDistributedSampler`. Then three ranks go on, with `start_index=600`. How many of the
# 800 images does no rank see? The sampler shuffles, so 20 more or fewer are right, too.

# %%
# answer: guess_lost
guess_lost = None  # images
### BEGIN SOLUTION
# The three ranks see the images with the numbers 600 to 799. Of the 200 that the two ranks
# did not see, three quarters have smaller numbers.
guess_lost = 150
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_lost", "800 images, resumed at 600", points=3) as student:
    student.guess(
        "guess_lost",
        lost_images(800, 600),
        "about as many images are lost",
        lost_hint(student.value("guess_lost")),
        within=20,
        unit="images",
    )

# %% [markdown]
# ## 2. Write: the rest of an epoch, for any number of ranks (7 points)
# `order` is a list, the order of an epoch's images. The first `done` of them have been seen,
# by any number of ranks. Write `shards(order, done, batch, rank, ranks)`: what this rank
# computes in the steps that are left. It returns a list with a row for each step, and a row is
# a list of images.
#
# - The rest of the order is cut into global batches of `batch` images. The last one can be
#   shorter. Step s has the images of batch s.
# - In each step, each image of the batch is on exactly one rank. Which one is up to you.
# - In each step, all ranks have rows of the same length: that of the batch, divided by `ranks`
#   and rounded up. A place without an image is -1.
#
# For example, `shards([3, 1, 4, 0, 2], 1, 3, rank, 2)` can be `[[1, 0], [2]]` on rank 0 and
# `[[4, -1], [-1]]` on rank 1.
#
# If a rank makes one step more than the others, the job hangs at the end of the epoch. If the
# rest is not taken from the order of the whole epoch, images are lost, and nothing fails.


# %%
# answer: shards
def shards(order: list[int], done: int, batch: int, rank: int, ranks: int) -> list[list[int]]:
    """This rank's images in each step that is left; -1 where it has none."""
    ### BEGIN SOLUTION
    rows = []
    for start in range(done, len(order), batch):
        images = order[start : start + batch]
        length = -(-len(images) // ranks)  # rounded up
        mine = images[rank::ranks]
        rows.append(mine + [-1] * (length - len(mine)))
    return rows
    ### END SOLUTION


# %%
with exercise.check("shards", "from the first image", points=1) as student:
    order = student.random.sample(range(24), 24)
    expect_shards(student, order, 0, 8, 2)

# %%
with exercise.check("shards", "batches that the ranks do not divide", points=2) as student:
    order = student.random.sample(range(23), 23)
    expect_shards(student, order, 0, 10, 4)

# %%
with exercise.check("shards", "the ranks change in the epoch", points=2) as student:
    order = student.random.sample(range(26), 26)
    seen = Counter()
    done = 0
    for ranks, steps in ((2, 2), (3, 1), (4, 99)):
        expect_shards(student, order, done, 6, ranks, f"{ranks} ranks: ")
        for own in all_shards(student, order, done, 6, ranks):
            seen.update(image for row in own[:steps] for image in real(row))
        done += 6 * steps
    student.expect(
        sorted(seen.elements()) == list(range(26)),
        "2 ranks, then 3, then 4 see each image of the epoch once",
        f"never: {[i for i in range(26) if not seen[i]]}, "
        f"more than once: {[i for i in range(26) if seen[i] > 1]}",
    )

# %%
with exercise.check("shards", "other worlds", points=2, hidden=True) as student:
    images = student.random.randint(40, 60)
    order = student.random.sample(range(images), images)
    expect_shards(student, order, images - 1, 16, 7)
    expect_shards(student, order, images, 16, 3)
    expect_shards(student, order, student.random.randint(1, 15), 16, 5)

# %% [markdown]
# ## 3. Find the bug: a checkpoint that half exists (6 points)
# A program saves the model and the optimizer. After a power cut it sometimes goes on with the
# model of step 20 and the optimizer of step 10, and sometimes it does not start at all. Find
# the bugs, and mend the two functions in the cell.
#
# `save_plan(step, model, optimizer)` returns the program's operations on the disk, in order.
# The check carries them out. `model` and `optimizer` are texts of letters.
#
# | Operation | What it does |
# |---|---|
# | `("write", name, text)` | Gives the file this text, which is perhaps not on the disk yet. |
# | `("sync", name)` | Waits until all of the file's text is on the disk. |
# | `("rename", old, new)` | Renames the file at once. If there is a file `new`, it is lost. |
# | `("remove", name)` | Removes the file at once. |
#
# The power can be cut between any two operations. When it is back, half of a file's text is
# missing, unless there was a `sync` after its last `write`. A rename is no `sync`. (On a real
# disk a new name can be lost, too, until the folder is synced. Leave that out here.)
#
# `load(files)` gets the texts of all files, by name. It returns the step, the model and the
# optimizer of the newest checkpoint, or `None` if there is none.
#
# - After a cut, `load` returns all of the checkpoint before, or all of the new one.
# - When all operations of a save are done, it returns the new one.


# %%
# answer: save_plan
def save_plan(step: int, model: str, optimizer: str) -> list[tuple]:
    """The operations that save a checkpoint."""
    plan = []
    for name, text in (("model", model), ("optimizer", optimizer)):
        plan.append(("write", f"{name}.tmp", f"{step} {text}"))
        plan.append(("rename", f"{name}.tmp", name))
        plan.append(("sync", name))
    return plan


def load(files: dict[str, str]) -> tuple[int, str, str] | None:
    """(step, model, optimizer) of the newest checkpoint."""
    if "model" not in files:
        return None
    step, model = files["model"].split()
    _, optimizer = files["optimizer"].split()
    return int(step), model, optimizer


### BEGIN SOLUTION
def save_plan(step: int, model: str, optimizer: str) -> list[tuple]:  # noqa: F811
    """The operations that save a checkpoint."""
    # The bugs: two files cannot be renamed at once, so a cut came between them. And the name
    # was valid before the text was on the disk.
    return [
        ("write", "checkpoint.tmp", f"{step} {model} {optimizer}"),
        ("sync", "checkpoint.tmp"),
        ("rename", "checkpoint.tmp", "checkpoint"),
    ]


def load(files: dict[str, str]) -> tuple[int, str, str] | None:  # noqa: F811
    """(step, model, optimizer) of the newest checkpoint."""
    if "checkpoint" not in files:
        return None
    step, model, optimizer = files["checkpoint"].split()
    return int(step), model, optimizer


### END SOLUTION

# %%
with exercise.check("save_plan", "a cut at any moment", points=4) as student:
    disk = Disk()
    expect_loaded(student, disk, None, "an empty disk has no checkpoint")
    for step in (10, 20):
        content = checkpoint(student, step)
        disk.run(plan_of(student, content))
        expect_loaded(student, disk, content, f"load returns step {step} after its save")
    old, new = checkpoint(student, 10), checkpoint(student, 20)
    disk = saved(student, Disk(), old)
    expect_loaded(student, disk, old, "a checkpoint that is saved stays after a cut")
    what = "after a cut, there is all of the old checkpoint or all of the new one"
    expect_whole(student, disk, old, new, what)

# %%
with exercise.check("save_plan", "two cuts", points=2, hidden=True) as student:
    first, second, third = (checkpoint(student, step) for step in (10, 20, 30))
    what = "after a cut in the first save, there is no checkpoint or all of it"
    expect_whole(student, Disk(), None, first, what)
    disk = saved(student, Disk(), first)
    wrong = ""
    for done in moments(student, second):
        after_one = saved(student, disk, second, done)
        kept, first_stop = loaded(student, after_one)
        cut = f"cut {last_of(student, second, done)}"
        if first_stop:
            wrong = wrong or f"{cut}: {first_stop}"
            continue
        for again in moments(student, third):
            got, stopped = loaded(student, saved(student, after_one, third, again))
            if not wrong and (stopped or got not in (kept, third)):
                where = f"{cut}, and in the next save {last_of(student, third, again)}"
                wrong = f"{where}: {stopped or f'load returns {got} and not {kept}'}"
        if loaded(student, saved(student, after_one, third))[0] != third:
            wrong = wrong or f"{cut}, then a whole save: load does not return {third}"
    student.expect(not wrong, "after a second cut, there is all of a checkpoint", wrong)

# %% [markdown]
# ## 4. Write: one answer on all ranks (4 points)
# A signal can come to one rank alone, in any step. Write `agree(received)`, which each rank
# calls at the end of each step. `received` is what this rank has received: `NOTHING`, `USR1`
# or `TERM`, which are 0, 1 and 2. It returns why all ranks stop now: the same on every rank.
#
# - `TERM` if any rank has received it; else `USR1` if any rank has; else `NOTHING`.
# - All ranks communicate in each step, with a collective of `torch.distributed`.
#
# `train` in the cell `# given` calls it. If one rank stops and another one does not, the other
# one waits for ever, and so does the job. The check says so.


# %%
# answer: agree
def agree(received: int) -> int:
    """What the ranks stop for: the same on all of them."""
    ### BEGIN SOLUTION
    signal_of_all = torch.tensor([received])
    dist.all_reduce(signal_of_all, dist.ReduceOp.MAX)
    return signal_of_all.item()
    ### END SOLUTION


# %%
with exercise.check("agree", "a signal to one rank of two", points=1) as student:
    expect_stop(student, [[0, 0, 0, 0], [0, 0, 1, 1]], [3, 1])
    expect_stop(student, [[0, 2, 2, 2], [0, 0, 0, 0]], [2, 2])

# %%
with exercise.check("agree", "a signal to each rank of two", points=1) as student:
    expect_stop(student, [[0, 1, 1], [0, 1, 1]], [2, 1])
    expect_stop(student, [[0, 1, 1], [0, 2, 2]], [2, 2])

# %%
with exercise.check("agree", "other ranks and signals", points=2, hidden=True) as student:
    step = student.random.randint(1, 4)
    usr1 = [0] * step + [1] * 4
    expect_stop(student, [usr1, usr1, [0] * len(usr1)], [step + 1, 1])
    expect_stop(student, [usr1, [2 * value for value in usr1], usr1], [step + 1, 2])
    expect_stop(student, [[0] * 5] * 3, [5, 0])

# %% [markdown]
# ## Your points

# %%
exercise.summary()
