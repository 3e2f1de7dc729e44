# %% [markdown]
# # Exercises: every strategy
# 40 minutes, 20 points. Do the sittings "Seven strategies", "Compressed" and "Decentralized"
# of lesson 10 first. No GPU. Run the cells from top to bottom, and write your answers in place
# of `# YOUR CODE HERE`.
#
# - The checks under a question call your functions and print a verdict for each statement.
#   When your notebook is graded, hidden checks also try other values.
# - The checks start new processes. They run only the cells that begin with `# given` or
#   `# answer`. So write all that an answer needs, imports too, into its cell.
# - The checks are the network between the ranks, and record what each rank sends.
#
# The questions do not depend on each other. Question 2 takes half of the time.

# %% jupyter={"source_hidden": true}
# setup
from multigpu.exercise import Exercise
from multigpu.exercise.verdicts import difference, shown

exercise = Exercise("10-strategies", seconds=5)


def ring_in_one_process(vectors):
    """The lesson's ring without processes: (each rank's sum, the bytes of each rank)."""
    ranks = len(vectors)
    chunks = [list(vector.chunk(ranks)) for vector in vectors]
    sent = [0] * ranks
    for hop in range(2 * (ranks - 1)):
        places = [(rank - hop) % ranks for rank in range(ranks)]
        messages = [of_rank[place] for of_rank, place in zip(chunks, places, strict=True)]
        for rank, (place, message) in enumerate(zip(places, messages, strict=True)):
            sent[rank] += message.nbytes
            right = chunks[(rank + 1) % ranks]
            right[place] = right[place] + message if hop < ranks - 1 else message
    return [torch.cat(of_rank) for of_rank in chunks], sent


# What a wrong guess of question 1 counts, in bytes, and a hint.
BYTES_HINTS = {
    150_000: "that is a number of numbers: each has 4 bytes",
    300_000: "those are the hops that add up: what do the others do?",
    400_000: "that is the whole vector once: what does a rank send in each hop?",
    1_200_000: "that is the whole vector to each other rank: in a hop a rank sends one chunk",
}


def bytes_hint(guess):
    """A hint that fits the guess of question 1."""
    for counted, hint in BYTES_HINTS.items():
        if isinstance(guess, int | float) and abs(guess - counted) < 0.01 * counted:
            return hint
    return "the ring sends another number: count its hops, and the bytes of one hop"


def wrong_sum(student, ranks, numbers):
    """What is wrong with the sums, if each number of rank r is 10 to the power r, or "".

    The digits of a sum show which ranks' numbers are in it, and how often.
    """
    vectors = [torch.full((numbers,), 10.0**rank) for rank in range(ranks)]
    expected = sum(10**rank for rank in range(ranks))
    run = student.ranks("late_ring", [[vector, 0.0] for vector in vectors])
    for rank, result in enumerate(run.values):
        if not isinstance(result, torch.Tensor) or result.shape != (numbers,):
            return f"{numbers} numbers on {ranks} ranks: rank {rank} returns {shown(result)}"
        for place, number in enumerate(result.tolist()):
            if number != expected:
                return (
                    f"if all numbers are 1 on rank 0, 10 on rank 1, …, then number {place} on "
                    f"rank {rank} is {number:.0f}, and not {expected}"
                )
    return "the sums are right only if no rank comes late: is a chunk used before it is sent?"


def run_ring(student, ranks, numbers):
    """Question 2 with random vectors. A verdict about the sums, and one about the calls."""
    vectors = [torch.randn(numbers, generator=student.generator) for _ in range(ranks)]
    arguments = [[vector, 0.2 if rank == 0 else 0.0] for rank, vector in enumerate(vectors)]
    run = student.ranks("late_ring", arguments)
    right = not difference(run.values, [sum(vectors)] * ranks, 1e-5, 1e-5)
    student.expect(
        right,
        "every rank returns the sum of all ranks' vectors",
        "" if right else wrong_sum(student, ranks, numbers),
    )
    kinds = {call.kind for calls in run.calls for call in calls}
    student.expect(
        kinds <= {"send", "recv"},
        "the ranks call only sends and receives",
        f"they call {', '.join(sorted(kinds - {'send', 'recv'}))}",
    )
    return run


def expect_bytes(student, run, numbers):
    """A verdict about the bytes of question 2."""
    ranks = len(run.values)
    most = 2 * (ranks - 1) * -(-numbers // ranks) * 4
    sent = [run.sent(rank) for rank in range(ranks)]
    student.expect(
        max(sent) <= most,
        "no rank sends more than 2(n − 1) chunks of N / n numbers, rounded up",
        f"{numbers} numbers on {ranks} ranks: at most {most:,} bytes for each rank, and they "
        f"send {', '.join(f'{each:,}' for each in sent)}",
    )


def restored(student, chunk):
    """The chunk after question 3: another process expands what one compresses."""
    levels, bounds = student.call("compress", chunk)
    student.expect(
        levels.dtype == torch.uint8 and levels.nbytes + bounds.nbytes == len(chunk) + 8,
        "the message is one byte for each number, and 8 bytes for the bounds",
        f"{len(chunk)} numbers: levels are {levels.dtype}, {levels.nbytes} bytes, and the "
        f"bounds {bounds.nbytes} bytes",
    )
    return student.ranks("expand", [[levels, bounds]]).values[0]


def expect_near(student, chunk):
    """A verdict: each number comes back with an error of at most half an interval."""
    wide = chunk.double()
    half = (wide.max() - wide.min()).item() / 510
    rounding = 1.2e-7 * wide.abs().max().item()
    student.close_to(
        restored(student, chunk),
        chunk,
        "each number comes back within half an interval",
        rtol=0.0,
        atol=1.01 * half + rounding,
    )


def peers_by_step(student, ranks, steps):
    """The peers of question 4: a list of all ranks' peers for each step."""
    return [
        [student.call("peer", rank, step, ranks) for rank in range(ranks)] for step in steps
    ]


def is_rank(peer, ranks):
    return isinstance(peer, int) and 0 <= peer < ranks


def expect_pairs(student, ranks, steps, table):
    """Verdicts: each rank has a peer in each step, which has this rank as its own."""
    alone = other = ""
    for step, peers in zip(steps, table, strict=True):
        for rank, peer in enumerate(peers):
            where = f"{ranks} ranks, step {step}: the peer of rank {rank} is {peer}"
            if not is_rank(peer, ranks) or peer == rank:
                alone = alone or where
            elif peers[peer] != rank:
                other = other or f"{where}, but the peer of rank {peer} is {peers[peer]}"
    student.expect(not alone, "each rank's peer is another rank", alone)
    student.expect(not other, "the peer of a rank's peer is the rank", other)


def expect_all_mixed(student, ranks, table):
    """A verdict: after as many steps as ranks, each rank has a part of all ranks' weights."""
    parts = [{rank} for rank in range(ranks)]
    for peers in table:
        parts = [
            mixed | parts[peer] if is_rank(peer, ranks) else mixed
            for mixed, peer in zip(parts, peers, strict=True)
        ]
    fewest = min(len(mixed) for mixed in parts)
    student.expect(
        fewest == ranks,
        "after n steps, a part of each rank's weights has come to all ranks",
        f"after {len(table)} steps on {ranks} ranks, a rank has those of {fewest} ranks only: "
        f"the ranks never agree",
    )


# %%
# given
import time

import torch
import torch.distributed as dist


def late_ring(tensor, seconds):
    """Question 2 on one rank, which comes `seconds` later than the others."""
    time.sleep(seconds)
    return ring_allreduce(tensor)


# %% [markdown]
# ## 1. Predict: the bytes of an all-reduce (2 points)
# Four ranks add up a vector of 100,000 float32 numbers, 400,000 bytes, by a ring all-reduce.
# How many bytes does each rank send? Write your number before you read question 2, then run
# the check. It runs the lesson's ring, and adds up the bytes of its messages.

# %%
# answer: guess_bytes
guess_bytes = None  # bytes that one rank sends; within 1% is right
### BEGIN SOLUTION
guess_bytes = 600_000  # 2 · (4 − 1) hops, each with a quarter of the vector
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_bytes", "100,000 numbers on 4 ranks", points=2) as student:
    _, sent = ring_in_one_process([torch.ones(100_000) for _ in range(4)])
    student.guess(
        "guess_bytes",
        sent[0],
        "this is what each rank sends",
        bytes_hint(student.value("guess_bytes")),
        within=0.01 * sent[0],
        unit="bytes",
    )

# %% [markdown]
# ## 2. Write: a ring all-reduce (8 points)
# `ring` of the lesson stops with an error if the number of ranks does not divide the length.
# Write `ring_allreduce(tensor)`, which works for any length. Each rank calls it with a float32
# vector (N,), and it returns the sum of all ranks' vectors.
#
# - The number of ranks n is 2 or more. N is 1 or more, and can be smaller than n.
# - Of `torch.distributed`, use `isend`, `irecv`, `send`, `recv`, `get_rank` and
#   `get_world_size`.
# - A rank sends at most 2(n − 1) chunks of N / n numbers, rounded up. So 10 numbers on 4 ranks
#   are at most 6 chunks of 3 numbers: 72 bytes.
#
# For example, rank 0 has `[1., 2., 3.]` and rank 1 has `[10., 20., 30.]`: both return
# `[11., 22., 33.]`.
#
# Mistakes here have three symptoms. The sums are right on 2 ranks and wrong on 4. The sums are
# right, but a step becomes slower with each further rank, because the bytes grow with n. The
# program hangs: if all ranks call `recv` before they send, each waits for its neighbour. The
# check stops them after 5 seconds. With NCCL, a `send` and a rank's first `isend` to another
# wait for their `recv`, too: there not all ranks can send first.


# %%
# answer: ring_allreduce
def ring_allreduce(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' vectors (N,), on every rank."""
    ### BEGIN SOLUTION
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    # Some chunks have one number more than the others, and some can be empty.
    chunks = list(tensor.tensor_split(ranks))
    for hop in range(2 * (ranks - 1)):
        out = (rank - hop) % ranks
        into = (out - 1) % ranks
        received = torch.empty_like(chunks[into])
        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        if rank % 2:
            dist.recv(received, left)
            dist.send(chunks[out], right)
        else:
            dist.send(chunks[out], right)
            dist.recv(received, left)
        chunks[into] = chunks[into] + received if hop < ranks - 1 else received
    return torch.cat(chunks)
    ### END SOLUTION


# %%
with exercise.check("ring_allreduce", "2 ranks", points=1) as student:
    run_ring(student, ranks=2, numbers=6)

# %%
with exercise.check("ring_allreduce", "4 ranks", points=2) as student:
    run_ring(student, ranks=4, numbers=8)

# %%
with exercise.check("ring_allreduce", "10 numbers on 4 ranks", points=1) as student:
    run_ring(student, ranks=4, numbers=10)

# %%
with exercise.check("ring_allreduce", "the bytes", points=2) as student:
    vectors = torch.ones(4, 1000)
    run = student.ranks("ring_allreduce", [[vector] for vector in vectors])
    student.close_to(run.values, [4 * vectors[0]] * 4, "each rank has the sum")
    expect_bytes(student, run, 1000)

# %%
with exercise.check(
    "ring_allreduce", "other lengths and ranks", points=2, hidden=True
) as student:
    ranks = student.random.choice([5, 7])
    for numbers in (ranks + 1, student.random.randint(1, ranks - 1)):
        run = run_ring(student, ranks, numbers)
        expect_bytes(student, run, numbers)

# %% [markdown]
# ## 3. Find the bug: the loss becomes NaN (5 points)
# A program sends each chunk of its gradients as bytes, as `bytegrad` does. `compress(chunk)`
# gets float32 numbers (N,) and returns two tensors: the levels, N bytes, and the bounds, the
# smallest and the largest number as float32. `expand(levels, bounds)` runs on another rank and
# returns the numbers.
#
# The cell below has the program's formulas, which are similar to Bagua's. They work until a
# layer is frozen: its gradients are all 0, and in the same step the weights become NaN on all
# ranks. There is a second symptom. In a chunk of numbers from 1000 to 1000.01, the largest
# number comes back as the smallest.
#
# Find the bugs, and mend `compress` and `expand` in the cell:
#
# - The message stays as small: N + 8 bytes.
# - Each number comes back with an error of at most half an interval, 1/510 of the chunk's
#   range. Where all numbers are equal, they come back as they were.
# - If a chunk has a NaN or an infinity, all of it comes back as NaN. So each rank sees that
#   training has diverged.


# %%
# answer: compress
def compress(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 numbers (N,) → levels (N,) uint8, and bounds (2,) float32."""
    low, high = chunk.aminmax()
    scale = 255 / (high - low)
    lowest = (high * scale).round() - 255
    levels = (chunk * scale).round() - lowest
    return levels.to(torch.uint8), torch.stack([low, high])


def expand(levels: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """The numbers (N,) that the levels stand for."""
    low, high = bounds
    scale = 255 / (high - low)
    lowest = (high * scale).round() - 255
    return (levels + lowest) / scale


### BEGIN SOLUTION
def compress(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: F811
    """Float32 numbers (N,) → levels (N,) uint8, and bounds (2,) float32."""
    # The bugs: the scale of equal numbers was 255 / 0. And far from 0, chunk * scale is so
    # large that float32 rounds it: a level became 256, which is 0 in a byte. So subtract the
    # minimum first.
    low, high = chunk.aminmax()
    levels = (chunk - low) / (high - low) * 255
    levels = levels.nan_to_num(0.0).round()  # 0 / 0 of equal numbers
    return levels.to(torch.uint8), torch.stack([low, high])


def expand(levels: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:  # noqa: F811
    """The numbers (N,) that the levels stand for; NaN if a bound is not finite."""
    low, high = bounds
    return low + levels / 255 * (high - low)


### END SOLUTION

# %%
with exercise.check("compress", "equal numbers", points=1) as student:
    for value in (0.0, 0.3):
        chunk = torch.full((5,), value)
        student.close_to(
            restored(student, chunk), chunk, f"numbers that are all {value} come back"
        )

# %%
with exercise.check("compress", "numbers near 1000", points=1) as student:
    expect_near(student, torch.linspace(-1, 2, 20))
    expect_near(student, torch.linspace(1000, 1000.01, 20))

# %%
with exercise.check("compress", "a NaN", points=1) as student:
    for value in (torch.nan, torch.inf, -torch.inf):
        chunk = torch.tensor([1.0, value, 3.0, 2.0])
        student.close_to(
            restored(student, chunk),
            torch.full((4,), torch.nan),
            f"a chunk with {value} comes back as NaN",
        )

# %%
with exercise.check("compress", "other chunks", points=2, hidden=True) as student:
    numbers = student.random.randint(30, 60)
    chunk = torch.randn(numbers, generator=student.generator)
    expect_near(student, chunk * 1e-8)
    expect_near(student, chunk * 1e4 - 1e5)
    expect_near(student, chunk[:1])

# %% [markdown]
# ## 4. Write: who averages with whom (5 points)
# In a decentralized step, a rank averages its weights with one peer. Write
# `peer(rank, step, ranks)`, the peer of this rank in this step. `ranks` is even, and `step` is
# 0, 1, 2, and so on.
#
# - Each rank has a peer in each step, another rank.
# - Two ranks swap: if rank 0's peer is rank 3, then rank 3's peer is rank 0.
# - The peers change, so that the ranks agree. Let n be the number of ranks. After any n steps
#   in a row, a part of each rank's weights has come to all ranks, directly or through others.
#
# Many functions do that. For example, `peer(0, 0, 2)` and `peer(0, 1, 2)` are 1.
#
# If two ranks do not have each other as peers, the program hangs in its first step. If the
# pairs are always the same, nothing hangs, but each pair trains a model of its own.


# %%
# answer: peer
def peer(rank: int, step: int, ranks: int) -> int:
    """The rank with which this rank averages its weights in this step."""
    ### BEGIN SOLUTION
    # The ranks of the first half meet those of the second half in turn.
    half = ranks // 2
    if rank < half:
        return (rank + step) % half + half
    return (rank - half - step) % half
    ### END SOLUTION


# %%
with exercise.check("peer", "pairs", points=1) as student:
    for ranks in (2, 4):
        expect_pairs(student, ranks, range(4), peers_by_step(student, ranks, range(4)))

# %%
with exercise.check("peer", "the ranks agree", points=2) as student:
    table = peers_by_step(student, 4, range(4))
    expect_pairs(student, 4, range(4), table)
    expect_all_mixed(student, 4, table)

# %%
with exercise.check("peer", "other ranks and steps", points=2, hidden=True) as student:
    for ranks in (6, student.random.choice([10, 12])):
        first = student.random.randint(100, 10_000)
        steps = range(first, first + ranks)
        table = peers_by_step(student, ranks, steps)
        expect_pairs(student, ranks, steps, table)
        expect_all_mixed(student, ranks, table)

# %% [markdown]
# ## Your points

# %%
exercise.summary()
