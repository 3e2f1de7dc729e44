# %% [markdown]
# # Exercises: long sequences and experts
# 50 minutes, 20 points, after the notebook PT_GPT_ContextExperts. You need no GPU. Run the
# cells from top to bottom. Write each answer in its own cell, below the line `# answer: …`,
# which must stay, with the imports and helpers that it needs; then run the checks below it.
# They say what is wrong. Hidden checks try other values when your notebook is graded.

# %% jupyter={"source_hidden": true}
# setup
from multigpu.exercise import Exercise

exercise = Exercise("19-context-experts")


def zigzag_places(tokens, ranks, rank):
    """Two of 2 × ranks chunks: the rank-th from the start and from the end."""
    size = tokens // (2 * ranks)
    late = tokens - (rank + 1) * size
    return [*range(rank * size, (rank + 1) * size), *range(late, late + size)]


def longest(held):
    """The sum over the ring's steps of the slowest rank's scores."""
    ranks = len(held)
    return sum(
        max(
            sum(key <= query for query in held[rank] for key in held[(rank - step) % ranks])
            for rank in range(ranks)
        )
        for step in range(ranks)
    )


def without_room(rows, experts, capacity):
    """For each row the places of the tokens beyond their expert's capacity."""
    places = []
    for row in rows:
        room = [math.ceil(capacity * len(row) / experts)] * experts
        places.append([])
        for place, expert in enumerate(row):
            room[expert] -= 1
            if room[expert] < 0:
                places[-1].append(place)
    return places


def times_balanced(held):
    """The ring's time ÷ the time if all ranks had the same number of scores in each step."""
    scores = sum(map(sum, ([key <= query for key in range(256)] for query in range(256))))
    return longest(held) / (scores / len(held))


def tensors(shapes, generator):
    return [torch.randn(shape, generator=generator) for shape in shapes]


def averaged(shared, own):
    """For each rank: the shared gradients' mean, and its experts' divided by the ranks."""
    ranks = len(shared)
    means = [sum(of_ranks) / ranks for of_ranks in zip(*shared, strict=True)]
    return [[means, [gradient / ranks for gradient in experts]] for experts in own]


# %%
# given
import math

import torch
import torch.distributed as dist

# %% [markdown]
# ## 1. Predict (4 points)
# A ring of 4 ranks computes causal attention over very many tokens, each rank with as many of
# them. Balanced perfectly, all steps of the ring would take 1. How long do they take if rank r
# holds the r-th quarter of the tokens, and how long in zig-zag order? The ranks wait for each
# other after each step.
#
# And 8 experts with capacity 1: the router sends all tokens to one of them. How many percent
# of the tokens are dropped?

# %%
# answer: guess_ring
guess_plain = None
guess_zigzag = None
guess_dropped = None
### BEGIN SOLUTION
guess_plain = 1.75
guess_zigzag = 1
guess_dropped = 87.5
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_ring", "plain order", points=1) as student:
    student.guess(
        "guess_plain",
        times_balanced([list(range(64 * rank, 64 * rank + 64)) for rank in range(4)]),
        "the time in plain order",
        "in the first step all ranks compute half of their scores, in the others some all",
        within=0.1,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_ring", "zig-zag order", points=1) as student:
    student.guess(
        "guess_zigzag",
        times_balanced([zigzag_places(256, 4, rank) for rank in range(4)]),
        "the time in zig-zag order",
        "count the scores of each rank in the second step",
        within=0.05,
    )

# %% jupyter={"source_hidden": true}
with exercise.check("guess_ring", "dropped", points=2) as student:
    student.guess(
        "guess_dropped",
        100 * len(without_room([[0] * 64], 8, 1.0)[0]) / 64,
        "the tokens dropped",
        "how many tokens does an expert take?",
        within=1,
        unit="percent",
    )

# %% [markdown]
# ## 2. The balance of a ring (6 points)
# Write `zigzag(tokens, ranks, rank)`: the list of the places that a rank holds in zig-zag
# order, its early chunk first. `tokens` is a multiple of 2 × `ranks`.
#
# Write `ring_time(held)`: `held[rank]` is the list of the places that a rank holds, in any
# order. In step s of the ring, rank r computes a score for each query of its own and each key
# of rank r - s, but only if the key's place is not after the query's. The ranks wait for each
# other after each step. How long do all steps take, if a score takes 1?


# %%
# answer: balance
def zigzag(tokens, ranks, rank):
    """The places that a rank holds."""
    ### BEGIN SOLUTION
    size = tokens // (2 * ranks)
    early, late = rank * size, (2 * ranks - 1 - rank) * size
    return [*range(early, early + size), *range(late, late + size)]
    ### END SOLUTION


def ring_time(held):
    """The scores of the slowest rank in each step, added up."""
    ### BEGIN SOLUTION
    ranks, time = len(held), 0
    for step in range(ranks):
        work = []
        for rank, queries in enumerate(held):
            keys = held[(rank - step) % ranks]
            work.append(sum(key <= query for query in queries for key in keys))
        time += max(work)
    return time
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
with exercise.check("balance", "16 tokens on 2 ranks", points=1) as student:
    for rank in range(2):
        places = student.call("zigzag", 16, 2, rank)
        student.equal(places, zigzag_places(16, 2, rank), f"the places of rank {rank}")

# %% jupyter={"source_hidden": true}
with exercise.check("balance", "time in both orders", points=2) as student:
    plain = [list(range(4 * rank, 4 * rank + 4)) for rank in range(4)]
    zigzag_order = [zigzag_places(16, 4, rank) for rank in range(4)]
    for name, held in (("plain", plain), ("zig-zag", zigzag_order)):
        student.equal(student.call("ring_time", held), longest(held), f"time in {name} order")

# %% jupyter={"source_hidden": true}
with exercise.check("balance", "other places", points=3, hidden=True) as student:
    ranks = student.random.randint(3, 5)
    tokens = 2 * ranks * student.random.randint(2, 3)
    places = [student.call("zigzag", tokens, ranks, rank) for rank in range(ranks)]
    expected = [zigzag_places(tokens, ranks, rank) for rank in range(ranks)]
    student.equal(places, expected, "the places of all ranks")
    order = list(range(tokens))
    student.random.shuffle(order)
    held = [order[rank::ranks] for rank in range(ranks)]
    student.equal(student.call("ring_time", held), longest(held), "time in another order")

# %% [markdown]
# ## 3. Tokens dropped (5 points)
# A router has chosen an expert for each token: `rows[row][place]` is its number. Of each row,
# an expert takes capacity × (tokens of the row) ÷ experts tokens, rounded up: the first ones
# that are sent to it. Write `dropped(rows, experts, capacity)`: for each row the list of the
# places of the tokens that no expert takes.


# %%
# answer: dropped
def dropped(rows, experts, capacity):
    """For each row the places of its dropped tokens."""
    ### BEGIN SOLUTION
    places = []
    for row in rows:
        room, taken = math.ceil(capacity * len(row) / experts), [0] * experts
        places.append([])
        for place, expert in enumerate(row):
            if taken[expert] == room:
                places[-1].append(place)
            else:
                taken[expert] += 1
    return places
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
with exercise.check("dropped", "one row", points=1) as student:
    rows = [[0, 1, 0, 0, 2, 0, 3, 0]]
    student.equal(
        student.call("dropped", rows, 4, 1.0), without_room(rows, 4, 1.0), "the places dropped"
    )

# %% jupyter={"source_hidden": true}
with exercise.check("dropped", "rounded up", points=1) as student:
    rows = [[0, 0, 0, 1, 1, 2, 2, 2, 2, 0]]
    expected = without_room(rows, 4, 1.0)
    student.equal(student.call("dropped", rows, 4, 1.0), expected, "the places dropped")

# %% jupyter={"source_hidden": true}
with exercise.check("dropped", "several rows", points=3, hidden=True) as student:
    tokens = student.random.choice([8, 16])
    rows = [[student.random.randrange(3) for _ in range(tokens)] for _ in range(4)]
    rows.append([0] * tokens)
    expected = without_room(rows, 4, 1.5)
    student.equal(student.call("dropped", rows, 4, 1.5), expected, "the places dropped")

# %% [markdown]
# ## 4. Find the bug: the experts' gradients (5 points)
# Each rank has rows of its own, experts of its own, and a copy of all other weights. Its loss
# is the mean over its own rows. In backward, an all-to-all has brought the gradients of all
# ranks' tokens to an expert. A program then calls the function below. With one rank it is
# right. With several there is no error.
#
# Write `average(shared, own)` without the bug: it makes the gradients, in place, those of one
# rank that has all rows. `shared` are the gradients of the weights of which each rank has a
# copy, `own` those of this rank's experts.


# %%
# given
def broken_average(shared, own):
    for gradient in [*shared, *own]:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def average_step(shared, own):
    """What the program does on one rank."""
    shared, own = ([gradient.clone() for gradient in each] for each in (shared, own))
    average(shared, own)
    return [shared, own]


# %%
# answer: average
def average(shared, own):
    """Make gradients those of one rank that has all rows, in place."""
    ### BEGIN SOLUTION
    ranks = dist.get_world_size()
    for gradient in shared:
        dist.all_reduce(gradient)
        gradient /= ranks
    for gradient in own:
        gradient /= ranks
    ### END SOLUTION


# %% jupyter={"source_hidden": true}
with exercise.check("average", "two ranks", points=1) as student:
    shared = [tensors([(3, 4), (5,)], student.generator) for _ in range(2)]
    own = [tensors([(2, 3)], student.generator) for _ in range(2)]
    run = student.ranks("average_step", list(zip(shared, own, strict=True)))
    for rank, expected in enumerate(averaged(shared, own)):
        student.close_to(
            run.values[rank][0], expected[0], f"rank {rank}: the shared gradients"
        )
        student.close_to(run.values[rank][1], expected[1], f"rank {rank}: its experts'")

# %% jupyter={"source_hidden": true}
with exercise.check("average", "what is sent", points=1) as student:
    shared = [tensors([(3, 4), (4,)], student.generator) for _ in range(2)]
    own = [tensors([(8, 8)], student.generator) for _ in range(2)]
    run = student.ranks("average_step", list(zip(shared, own, strict=True)))
    student.equal(run.sent(0), 4 * 16, "the bytes of the shared gradients, and no others")

# %% jupyter={"source_hidden": true}
with exercise.check("average", "three ranks", points=3, hidden=True) as student:
    size = student.random.randint(2, 6)
    shared = [tensors([(size, 4)], student.generator) for _ in range(3)]
    own = [tensors([(2, size), (size,)], student.generator) for _ in range(3)]
    run = student.ranks("average_step", list(zip(shared, own, strict=True)))
    student.close_to(run.values, averaged(shared, own), "all gradients", atol=1e-5)

# %%
exercise.summary()
