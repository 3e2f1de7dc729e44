# %% [markdown]
# # Exercises: the clinic
# 50 minutes, 20 points, after the notebook PT_Clinic. You need no GPU. Four other patients are
# in `lessons/18-clinic/others`. The first line of each says how to start it. Run them in a
# terminal, with the tools of the lesson: the checks of question 1 do not run them, they
# compare what you write. Write each answer in its own cell, below the line `# answer: …`,
# which must stay, with the imports and helpers that it needs; then run the checks below it.
# Hidden checks try other values when your notebook is graded.
#
# In question 1 write a rank, the number of a line of the file, and a cause, one of
#
# - `"condition"`: some ranks do not call a collective, because of a condition on the rank
# - `"order"`: the ranks call the same collectives in other orders
# - `"stop"`: each rank decides by its own numbers when it leaves a loop
# - `"messages"`: more messages are expected than sent
# - `"gradient"`: gradients are not averaged
# - `"seed"`: ranks draw other random numbers where all need the same ones
# - `"share"`: one rank has more work than the others
# - `"network"`: an address or an interface is wrong

# %%
# setup
import hashlib

from multigpu.exercise import Exercise

exercise = Exercise("18-clinic")
# The answers, hashed: so that you do not read them here by accident.
RIGHT = {
    "stopping": ["f1d618de14b5", "9bcdbb2ed175", "55c3e60f69ae"],
    "stages": ["655c5a464d96", "20b80d397545"],
    "shuffle": ["89836420b001", "9a8ba189cb29"],
    "lengths": ["665050851658", "f3c18beeb10c"],
}


def is_right(patient, *answer):
    text = " ".join(["lesson 18:", patient, *map(str, answer)])
    if len(text.split()) != 3 + len(answer):  # a rank and a line are no cause
        return False
    return hashlib.sha256(text.encode()).hexdigest()[:12] in RIGHT[patient]


# %% [markdown]
# ## 1. Four patients (12 points)
# Name of each patient a rank, the line and the cause:
#
# - `stopping.py` hangs on GPUs, and breaks off on the CPU: the rank that leaves the loop
#   first, and the line in which it does.
# - `stages.py` waits, and has printed all micro-batches but one: the rank that waits for ever,
#   and the line in which it waits.
# - `shuffle.py` reads some images twice in an epoch, and others not: the rank whose images are
#   not those of a run on one GPU, and the line that must change.
# - `lengths.py` is slow: the rank for which the other one waits, and the line that gives it
#   more to do.

# %%
# answer: guess_patients
guess_stopping_rank, guess_stopping_line, guess_stopping_cause = None, None, None
guess_stages_rank, guess_stages_line, guess_stages_cause = None, None, None
guess_shuffle_rank, guess_shuffle_line, guess_shuffle_cause = None, None, None
guess_lengths_rank, guess_lengths_line, guess_lengths_cause = None, None, None
### BEGIN SOLUTION
guess_stopping_rank, guess_stopping_line, guess_stopping_cause = 1, 34, "stop"
guess_stages_rank, guess_stages_line, guess_stages_cause = 1, 31, "messages"
guess_shuffle_rank, guess_shuffle_line, guess_shuffle_cause = 1, 25, "seed"
guess_lengths_rank, guess_lengths_line, guess_lengths_cause = 1, 25, "share"
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_patients", "stopping: rank and line", points=2) as student:
    answer = student.value("guess_stopping_rank"), student.value("guess_stopping_line")
    student.expect(
        is_right("stopping", *answer),
        "the rank and the line",
        "`multigpu virtual` says where both ranks are: which of them has left the loop?",
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_patients", "stopping: cause", points=1) as student:
    student.expect(
        is_right("stopping", student.value("guess_stopping_cause")),
        "the cause",
        "from whose numbers does the line compute its decision?",
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_patients", "stages: rank and line", points=2) as student:
    answer = student.value("guess_stages_rank"), student.value("guess_stages_line")
    student.expect(
        is_right("stages", *answer),
        "the rank and the line",
        "which rank has ended, and which one is in a call?",
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_patients", "stages: cause", points=1) as student:
    student.expect(
        is_right("stages", student.value("guess_stages_cause")),
        "the cause",
        "how often does each rank go through its loop?",
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_patients", "shuffle: rank and line", points=2) as student:
    answer = student.value("guess_shuffle_rank"), student.value("guess_shuffle_line")
    student.expect(
        is_right("shuffle", *answer),
        "the rank and the line",
        "what does `multigpu prove` say of the rows?",
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_patients", "shuffle: cause", points=1) as student:
    student.expect(
        is_right("shuffle", student.value("guess_shuffle_cause")),
        "the cause",
        "print the first five rows of each rank's order",
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_patients", "lengths: rank and line", points=2) as student:
    answer = student.value("guess_lengths_rank"), student.value("guess_lengths_line")
    student.expect(
        is_right("lengths", *answer),
        "the rank and the line",
        "whose lane of the timeline has no gaps?",
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_patients", "lengths: cause", points=1) as student:
    student.expect(
        is_right("lengths", student.value("guess_lengths_cause")),
        "the cause",
        "how long is the longest sequence of each rank?",
    )

# %% [markdown]
# ## 2. Stop together (4 points)
# Mend `stopping.py`: write `stops(loss, before)`, which each rank calls after a step with its
# own loss. It returns whether training stops, and the mean loss of all ranks. All ranks stop
# after the same step: the first one in which the mean is larger than `before`, the mean of the
# step before. The cell shows how it is called.


# %%
# given
import torch
import torch.distributed as dist


def train(losses):
    """A rank's loop. Returns the step after which it stops, and the last mean."""
    before = float("inf")
    for step, loss in enumerate(losses):
        stop, before = stops(loss, before)
        if stop:
            return step, before
    return len(losses), before


# %%
# answer: stops
def stops(loss: float, before: float) -> tuple[bool, float]:
    """Whether all ranks stop after this step, and the mean of their losses."""
    ### BEGIN SOLUTION
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(mean)
    mean = mean.item() / dist.get_world_size()
    return mean > before, mean
    ### END SOLUTION


# %%
with exercise.check("stops", "two ranks", points=2) as student:
    losses = [[4.0, 2.0, 3.0, 2.5, 1.0], [4.0, 4.0, 2.0, 3.5, 1.0]]
    run = student.ranks("train", [[of_rank] for of_rank in losses])
    student.equal([step for step, _ in run.values], [3, 3], "both ranks stop after step 3")
    student.close_to([mean for _, mean in run.values], [3.0, 3.0], "the last mean is 3.0")

# %%
with exercise.check("stops", "other ranks", points=2, hidden=True) as student:
    ranks, stop = student.random.randint(3, 4), student.random.randint(2, 4)
    means = [6.0 - step for step in range(stop)] + [7.0, 1.0]
    noise = torch.randn(ranks, len(means), generator=student.generator)
    losses = (torch.tensor(means) + noise - noise.mean(0)).tolist()
    run = student.ranks("train", [[of_rank] for of_rank in losses])
    student.equal([step for step, _ in run.values], [stop] * ranks, "all stop together")
    student.close_to([mean for _, mean in run.values], [7.0] * ranks, "the last mean")

# %% [markdown]
# ## 3. A tool of your own (4 points)
# Write `ill_ranks(loss)`, which each rank calls with its own loss, a tensor with one element,
# before the gradients are averaged. It returns the numbers of all ranks whose loss is not
# finite, in order, on each rank.


# %%
# answer: ill_ranks
def ill_ranks(loss: torch.Tensor) -> list[int]:
    """The ranks whose loss is NaN or infinite."""
    ### BEGIN SOLUTION
    ill = torch.zeros(dist.get_world_size())
    ill[dist.get_rank()] = not torch.isfinite(loss).item()
    dist.all_reduce(ill)
    return ill.nonzero().flatten().tolist()
    ### END SOLUTION


# %%
with exercise.check("ill_ranks", "one NaN", points=2) as student:
    run = student.ranks("ill_ranks", [[torch.tensor(2.0)], [torch.tensor(torch.nan)]])
    student.equal(run.values, [[1], [1]], "both ranks know that rank 1 has NaN")

# %%
with exercise.check("ill_ranks", "other losses", points=2, hidden=True) as student:
    ranks = student.random.randint(3, 4)
    kinds = [torch.inf, torch.nan, -torch.inf, 1.0][:ranks]
    student.random.shuffle(kinds)
    kinds[student.random.randrange(ranks)] = 2.0
    run = student.ranks("ill_ranks", [[torch.tensor(kind)] for kind in kinds])
    ill = [rank for rank, kind in enumerate(kinds) if not 0 < kind < torch.inf]
    student.equal(run.values, [ill] * ranks, "NaN and both infinities")
    run = student.ranks("ill_ranks", [[torch.tensor(1.0)]] * ranks)
    student.equal(run.values, [[]] * ranks, "no rank, if all are finite")

# %%
exercise.summary()
