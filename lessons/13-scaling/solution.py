# %% [markdown]
# # Exercises: scaling
# 40 minutes, 20 points. Do the notebook of lesson 13 first. No GPU. Run the cells from top to
# bottom, and write your answers in place of `# YOUR CODE HERE`.
#
# - The checks under a question call your functions and print a verdict for each statement.
#   When your notebook is graded, hidden checks also try other values.
# - The checks start a new process. It runs only the cells that begin with `# given` or
#   `# answer`. So write all that an answer needs, imports too, into its cell.
#
# The questions do not depend on each other.

# %% jupyter={"source_hidden": true}
# setup
from collections import Counter

from multigpu.exercise import Exercise
from multigpu.exercise.verdicts import difference
from multigpu.scaling import laws
from multigpu.scaling.compute import Compute, Gradient
from multigpu.scaling.step import ddp_step

exercise = Exercise("13-scaling", seconds=5)

# Question 1, in seconds: after each 10 ms of backward a bucket of 25 MiB is full.
FOUR_BUCKETS = Compute(
    samples=32,
    forward=0.020,
    backward=0.040,
    update=0.004,
    copies_in=0.0,
    gradients=tuple(Gradient(f"layer{n}", 25 * 2**20, n / 100, 0.0) for n in (1, 2, 3, 4)),
    memory=0,
)


# Wrong guesses of question 1, in percent, and a hint for each.
EFFICIENCY_HINTS = {
    100 * 64 / 124: "that begins after backward: the first bucket is full after 10 ms of it",
    100 * 64 / 79: "that hides three of four, but each takes 15 ms, and a bucket fills in 10",
    100.0: "that hides the last one, too: when is the last bucket full?",
    100 * 60 / 90: "that leaves the update out",
}


def efficiency_hint(guess):
    """A hint that fits the guess of question 1."""
    for wrong, hint in EFFICIENCY_HINTS.items():
        if isinstance(guess, int | float) and abs(guess - wrong) < 0.9:
            return hint
    return "the step gives another number: when is each bucket full, and the network free?"


def run_of(student, ranks, batch, images_per_s):
    """A run of question 2 whose median step gives `images_per_s`. One step was disturbed."""
    median = batch / images_per_s
    draw = student.random.uniform
    factors = [1.0, draw(0.8, 0.95), draw(0.95, 0.99), draw(1.01, 1.1), draw(4, 10)]
    student.random.shuffle(factors)
    return {
        "world_size": ranks,
        "batch_size": batch,
        "step_seconds": [factor * median for factor in factors],
    }


def expect_efficiencies(student, runs, expected, what):
    """A verdict about question 2; it says if the steps' mean was taken."""
    got = student.call("efficiencies", runs)
    wrong = difference(got, expected, rtol=1e-5, atol=1e-6)
    if wrong:
        means = {}
        for run in runs:
            mean = sum(run["step_seconds"]) / len(run["step_seconds"])
            means[run["world_size"]] = run["batch_size"] / mean / run["world_size"]
        base = means[min(means)]
        if not difference(got, {n: rate / base for n, rate in means.items()}, rtol=1e-6):
            wrong = "that is with the mean step, which a disturbed one changes: use the median"
    student.expect(not wrong, what, wrong)


def weak_scaling_hint(got, gpus, images, steps, warm_up, per_image, all_reduce):
    """What a wrong rate of question 3 shows; "" if it shows no known mistake.

    Looks for the mistakes of the clock first: they hide the others.
    """
    if not isinstance(got, int | float) or got <= 0:
        return ""
    if got > 10 * gpus / per_image:
        return "the clock stops before the GPUs have ended their steps"
    clocks = {
        "": 0,
        "the warm-up is in the mean": 0.5 * warm_up,
        "the clock starts while the warm-up is still in the queue": None,
    }
    batches = {"": images, "a GPU's batch is smaller if there are more GPUs": images // gpus}
    counts = {"": gpus * images, "your function returns those of one GPU": images}
    for batch_text, batch in batches.items():
        step = batch * per_image + all_reduce
        for clock_text, more in clocks.items():
            more = warm_up * (0.5 + step) if more is None else more
            for count_text, count in counts.items():
                if abs(got / (count / (step + more / steps)) - 1) < 0.005:
                    return clock_text or batch_text or count_text
    step = images * per_image + all_reduce
    return fixed_number_hint(got, gpus * images / step, gpus * images, steps, warm_up)


def fixed_number_hint(got, right, images, steps, warm_up):
    """What a wrong rate of question 3 shows if the answer has a fixed number of steps."""
    for slow in range(1, warm_up):
        if abs(got * (images / right + 0.5 * slow / steps) / images - 1) < 0.002:
            few = f"the mean leaves out only {warm_up - slow} of {warm_up} slow steps"
            return f"{few}: `cluster.warm_up` says how many are slow"
    for number in range(1, 101):
        for measured, divisor in ((number, steps), (steps, number)):
            if number != steps and abs(got * measured / divisor / right - 1) < 0.002:
                text = f"the clock measures {measured} steps, the time is divided by {divisor}"
                return f"{text}: the call asks for steps={steps} in both places"
    return ""


def efficiency_mistake(got, rates):
    """What wrong efficiencies of question 3 show; "" if they show no known mistake."""

    def are(expected):
        return not difference(got, expected, rtol=0.01)

    if are({n: rate / rates[1] for n, rate in rates.items()}):
        return "these are speed-ups: divide each by its number of GPUs"
    if are({n: 100 * rate / rates[1] / n for n, rate in rates.items()}):
        return "these are percents, and 1.0 is wanted for one GPU"
    first = next(iter(rates))
    if are({n: rate / rates[first] / n for n, rate in rates.items()}):
        return f"you compare with the first in `clusters`, {first} GPUs: compare with 1 GPU"
    return ""


def expect_weak_scaling(student, order, steps, warm_up, measured=1):
    """Verdicts about question 3, for numbers of GPUs in this order."""
    images = 8 * student.random.randint(8, 32)
    per_image = student.random.uniform(1e-4, 1e-3)
    lost = {n: student.random.uniform(0.05, 0.3) if n > 1 else 0.0 for n in sorted(order)}
    compute = per_image * images
    settings = [(n, per_image, lost[n] * compute, warm_up) for n in order]
    got = student.call("weak_scaling_of", settings, images, steps)
    rates = {n: rate for n, (rate, _) in got.items()}
    expected = {n: n * images / (compute * (1 + lost[n])) for n in order}
    wrong = difference(rates, expected, rtol=0.01)
    hint = ""
    if wrong:
        hints = Counter()
        for n, *numbers in settings:
            times = (steps, warm_up, *numbers[:2])
            hints[weak_scaling_hint(rates.get(n), n, images, *times)] += 1
        del hints[""]
        # One number of GPUs can fit a mistake by chance: the most frequent hint is taken.
        look = f"{wrong}; look at the warm-up, both waits, the images, and the divisor"
        hint = hints.most_common(1)[0][0] if hints else look
    student.expect(not wrong, "these are the images/s of all GPUs together", hint)

    efficiencies = {n: efficiency for n, (_, efficiency) in got.items()}
    mistake = difference(efficiencies, {n: 1 / (1 + lost[n]) for n in order}, rtol=0.01)
    if mistake and wrong:
        mistake += "; mend the images/s first"
    elif mistake:
        mistake = efficiency_mistake(efficiencies, expected) or mistake
    student.expect(not mistake, "these are the efficiencies", mistake)


# %%
# given
import statistics


class Cluster:
    """GPUs with a clock, for question 3. As real ones, they work after `step` has returned.

    The first `warm_up` steps take longer: kernels are chosen, and memory is allocated.
    """

    def __init__(self, per_image, all_reduce, warm_up):
        self.warm_up = warm_up
        self._per_image = per_image
        self._all_reduce = all_reduce
        self._slow_steps = warm_up
        self._host = 0.0
        self._gpus = 0.0

    def step(self, images):
        """Launch a step in which each GPU has `images` images."""
        self._host += 1e-5
        seconds = images * self._per_image + self._all_reduce
        if self._slow_steps > 0:
            self._slow_steps -= 1
            seconds += 0.5
        self._gpus = max(self._gpus, self._host) + seconds

    def synchronize(self):
        """Wait until the GPUs have ended all steps."""
        self._host = max(self._host, self._gpus)

    def now(self):
        """The host's clock, in seconds."""
        return self._host


def weak_scaling_of(settings, images, steps):
    """Question 3 on new clusters, from (GPUs, per_image, all_reduce, warm_up) of each."""
    clusters = {gpus: Cluster(*numbers) for gpus, *numbers in settings}
    return weak_scaling(clusters, images, steps)


# %% [markdown]
# ## 1. Predict: what hides behind backward (2 points)
# One GPU computes a step in 64 ms: forward 20 ms, backward 40 ms, update 4 ms. Backward fills
# one of four equal buckets after each 10 ms. On 64 GPUs with the same batch each, the
# all-reduce of one bucket takes 15 ms. The all-reduces run one after the other, beside
# backward; the update waits for the last one. Stragglers and copies take no time.
#
# How efficient are the 64 GPUs? A drawing with two rows is enough. The check runs the step of
# `multigpu scaling` with these times.

# %%
# answer: guess_efficiency
guess_efficiency = None  # percent; within 1 point is right
### BEGIN SOLUTION
# The buckets are sent from 10 to 25, 25 to 40, 40 to 55 and 55 to 70 ms after the start of
# backward: 20 + 70 + 4 ms.
guess_efficiency = 100 * 64 / 94
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_efficiency", "four buckets", points=2) as student:
    step = ddp_step(FOUR_BUCKETS, lambda nbytes: 0.015)
    student.guess(
        "guess_efficiency",
        100 * FOUR_BUCKETS.alone / step.seconds,
        "this is the efficiency of 64 GPUs",
        efficiency_hint(student.value("guess_efficiency")),
        within=1.0,
        unit="percent",
    )

# %% [markdown]
# ## 2. Write: the efficiencies of measured runs (5 points)
# A job array has measured the same model on several numbers of ranks. Each run is a dict with
# three keys of the lesson's `metrics.json`: `world_size`, `batch_size` (the global batch) and
# `step_seconds` (a list). Write `efficiencies(runs)`, which returns {ranks: efficiency}.
#
# - A run's speed is its global batch ÷ its **median** step. A program beside it can disturb a
#   step.
# - The runs can be of strong or of weak scaling, and they come in any order.
# - If several runs have the same number of ranks, put their steps together. Such runs have the
#   same global batch.
# - The run with the fewest ranks is 100% efficient. Often that is one rank. At many sites it
#   is a whole node, with 4 or 8 ranks.
#
# For example, one rank with a batch of 64 takes 0.1 s, and two ranks with a batch of 128 take
# 0.125 s: `{1: 1.0, 2: 0.8}`.


# %%
# answer: efficiencies
def efficiencies(runs: list[dict]) -> dict[int, float]:
    """The efficiency of each number of ranks, relative to the fewest ranks."""
    ### BEGIN SOLUTION
    steps = {}
    batches = {}
    for run in runs:
        ranks = run["world_size"]
        steps.setdefault(ranks, []).extend(run["step_seconds"])
        batches[ranks] = run["batch_size"]
    per_rank = {
        ranks: batches[ranks] / statistics.median(seconds) / ranks
        for ranks, seconds in steps.items()
    }
    base = per_rank[min(per_rank)]
    return {ranks: speed / base for ranks, speed in per_rank.items()}
    ### END SOLUTION


# %%
with exercise.check("efficiencies", "strong scaling", points=2) as student:
    runs = [run_of(student, n, 512, speed) for n, speed in ((1, 100), (2, 190), (4, 300))]
    expect_efficiencies(
        student,
        runs,
        {1: 1.0, 2: 0.95, 4: 0.75},
        "1, 2 and 4 ranks share 512 images: these are the efficiencies",
    )

# %%
with exercise.check("efficiencies", "weak scaling", points=1) as student:
    runs = [run_of(student, n, 64 * n, speed) for n, speed in ((1, 100), (2, 160), (8, 480))]
    expect_efficiencies(
        student,
        runs,
        {1: 1.0, 2: 0.8, 8: 0.6},
        "1, 2 and 8 ranks have 64 images each: these are the efficiencies",
    )

# %%
with exercise.check("efficiencies", "other runs", points=2, hidden=True) as student:
    first = student.random.choice([3, 4])
    shares = {n * first: student.random.uniform(0.4, 0.95) for n in (2, 4, 16)} | {first: 1.0}
    runs = [run_of(student, n, 32 * n, 50 * share * n) for n, share in shares.items()]
    expect_efficiencies(
        student,
        runs,
        shares,
        "the fewest ranks are a node, and their run comes last: these are the efficiencies",
    )
    whole = run_of(student, 2, 60, 150)
    parts = sorted(whole["step_seconds"])
    halves = [{**whole, "step_seconds": part} for part in (parts[:1], parts[1:])]
    student.close_to(
        student.call("efficiencies", [*halves, run_of(student, 1, 60, 100)]),
        {1: 1.0, 2: 0.75},
        "the steps of two runs with 2 ranks are put together",
    )

# %% [markdown]
# ## 3. Find the bug: all GPUs are 100% efficient (6 points)
# The program below reports millions of images/s, and exactly 100% efficiency on any number of
# GPUs. It is meant to measure **weak scaling**: `images` images on *each* GPU, and the mean of
# `steps` steps. `clusters` is {number of GPUs: Cluster}; one of the numbers is 1. `Cluster` is
# in the cell `# given`, and has `step`, `synchronize`, `now` and `warm_up`. The numbers of
# GPUs come in any order.
#
# There are four mistakes, and one can hide another. Mend `weak_scaling` in the cell.


# %%
# answer: weak_scaling
def weak_scaling(clusters: dict, images: int, steps: int) -> dict[int, tuple[float, float]]:
    """{GPUs: (images/s of all GPUs, efficiency)}."""
    rates = {}
    for gpus, cluster in clusters.items():
        began = cluster.now()
        for _ in range(steps):
            cluster.step(images // gpus)
        seconds = (cluster.now() - began) / steps
        rates[gpus] = images / seconds
    return {gpus: (rate, rate / rates[1]) for gpus, rate in rates.items()}


### BEGIN SOLUTION
def weak_scaling(  # noqa: F811
    clusters: dict, images: int, steps: int
) -> dict[int, tuple[float, float]]:
    """{GPUs: (images/s of all GPUs, efficiency)}."""
    # The mistakes: the clock stopped at the launch of the last step; the warm-up counted; the
    # batch of a GPU became smaller with more GPUs, which is strong scaling; and a speed-up
    # is no efficiency before it is divided by the number of GPUs.
    rates = {}
    for gpus, cluster in clusters.items():
        for _ in range(cluster.warm_up):
            cluster.step(images)
        cluster.synchronize()
        began = cluster.now()
        for _ in range(steps):
            cluster.step(images)
        cluster.synchronize()
        seconds = (cluster.now() - began) / steps
        rates[gpus] = gpus * images / seconds
    return {gpus: (rate, rate / rates[1] / gpus) for gpus, rate in rates.items()}


### END SOLUTION

# %%
with exercise.check("weak_scaling", "one GPU", points=1) as student:
    expect_weak_scaling(student, order=[1], steps=7, warm_up=2)

# %%
with exercise.check("weak_scaling", "1, 2 and 8 GPUs", points=2) as student:
    expect_weak_scaling(student, order=[2, 1, 8], steps=11, warm_up=3)

# %%
with exercise.check("weak_scaling", "other clusters", points=3, hidden=True) as student:
    warm_up = student.random.randint(4, 7)
    steps = student.random.randint(3, 6)
    expect_weak_scaling(student, order=[16, 1, 3], steps=steps, warm_up=warm_up)

# %% [markdown]
# ## 4. Write: how many GPUs to ask for (7 points)
# You have measured the speed-up of a training on a few GPUs, and want to know how many to ask
# for. Write two functions.
#
# `serial_share(speed_ups)` gets {GPUs: speed-up}, and returns the serial share s of Amdahl's
# law. The law is 1/speed-up − 1/n = s (1 − 1/n): a line through the origin with the slope s.
# Return its slope by least squares, Σxy / Σx². One of the numbers of GPUs can be 1. (In this
# fit few GPUs weigh most: an error of 1% in a speed-up moves 1/speed-up by 0.01/speed-up.)
#
# `ask_for(share, hours, queue, lowest)` returns the number of GPUs with which the result comes
# first. The training takes `hours` on one GPU, `share` of it serial; `queue` is {GPUs: hours
# of waiting}.
#
# - By Amdahl's law, the efficiency must be `lowest` or more: 0.7 means 70%.
# - If two numbers of GPUs give the result at the same time, return the smaller one.
# - If no number in `queue` is efficient enough, return `None`.
#
# For example, `ask_for(0.0, 8, {1: 0, 2: 1, 4: 9}, 0.5)` is 2: the result comes after 5 hours.


# %%
# answer: ask_for
def serial_share(speed_ups: dict[int, float]) -> float:
    """The serial share of Amdahl's law, by least squares."""
    ### BEGIN SOLUTION
    points = [(1 - 1 / n, 1 / speed_up - 1 / n) for n, speed_up in speed_ups.items()]
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    ### END SOLUTION


def ask_for(share: float, hours: float, queue: dict[int, float], lowest: float) -> int | None:
    """The number of GPUs whose result comes first."""
    ### BEGIN SOLUTION
    hours_until_done = {}
    for gpus in sorted(queue):
        speed_up = 1 / (share + (1 - share) / gpus)
        if speed_up / gpus >= lowest:
            hours_until_done[gpus] = queue[gpus] + hours / speed_up
    return min(hours_until_done, key=hours_until_done.get) if hours_until_done else None
    ### END SOLUTION


# %%
with exercise.check("ask_for", "the fit", points=2) as student:
    share = student.random.uniform(0.01, 0.1)
    exact = {n: laws.amdahl(share, n) for n in (1, 2, 4, 8)}
    student.close_to(student.call("serial_share", exact), share, "points on the law give s")
    noisy = {n: speed_up * (1 - 0.01 * n) for n, speed_up in exact.items()}
    student.close_to(
        student.call("serial_share", noisy),
        laws.fit_amdahl(list(noisy), list(noisy.values())),
        "points beside the law give the slope by least squares",
    )

# %%
with exercise.check("ask_for", "the first result", points=2) as student:
    queue = {1: 0.0, 4: 0.5, 16: 2.0, 64: 6.25}
    student.equal(
        student.call("ask_for", 0.2, 100.0, queue, 0.0), 16, "16 GPUs give the first result"
    )
    student.equal(
        student.call("ask_for", 0.2, 100.0, queue, 0.6), 4, "at least 60% efficient: 4 GPUs"
    )

# %%
with exercise.check("ask_for", "other trainings", points=3, hidden=True) as student:
    hours = student.random.uniform(50, 500)
    share = student.random.uniform(0.1, 0.3)
    # 32 GPUs would save more than this wait for them if nothing were serial.
    wait = hours * (1 / 8 - 1 / 32) * (1 - share / 2)
    queue = {32: 1.0 + wait, 2: 0.5, 8: 1.0, 128: hours}
    student.equal(
        student.call("ask_for", share, hours, queue, 0.0), 8, "8 GPUs give the first result"
    )
    student.equal(
        student.call("ask_for", 0.0, 16.0, {4: 6.0, 2: 2.0}, 0.5),
        2,
        "if the results come at the same time, fewer GPUs are asked for",
    )
    student.equal(
        student.call("ask_for", 0.5, hours, {8: 0.0, 64: 1.0}, 0.5),
        None,
        "if no number of GPUs is efficient enough, there is none",
    )
    exact = {n: laws.amdahl(share, n) for n in (48, 3, 6)}
    student.close_to(
        student.call("serial_share", exact), share, "the fit needs no point with one GPU"
    )

# %% [markdown]
# ## Your points

# %%
exercise.summary()
