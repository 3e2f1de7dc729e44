# %% [markdown]
# # Exercises that are attacked
#
# Three small questions, one of each kind: on several ranks, a value, a plain function.
# %%
# setup
from multigpu.exercise import Exercise

exercise = Exercise("attacks", seconds=5)
# %%
# given
import torch
import torch.distributed as dist

FACTORS = {"twice": 2.0}
MORE = [0.0]
NOTHING = torch.zeros(())


class Scale:
    """A check uses it by way of `doubled`."""

    def __init__(self):
        self.more = 0.0

    def factor(self):
        import operator

        return operator.pos(FACTORS["twice"])


SCALE = Scale()


def plus(amount):
    """A function that adds the amount."""

    def add(value):
        return value + amount

    return add


add_nothing = plus(0.0)


def doubled(numbers, times=1, more=MORE):
    """Twice the `total` of the answer."""
    twice = torch.mul(torch.tensor(sum([total(numbers)] * times)), Scale().factor())
    return add_nothing(twice + NOTHING + SCALE.more + more[0]).item()


# %% [markdown]
# ## 1. The mean over ranks (4 points)


# %%
# answer: mean
def mean(tensor):
    """The mean of all ranks' tensors."""
    ### BEGIN SOLUTION
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()
    ### END SOLUTION


# %%
with exercise.check("mean", "two ranks", points=1) as student:
    run = student.ranks("mean", [[torch.ones(2)], [3 * torch.ones(2)]])
    student.close_to(run.values, [[2.0, 2.0]] * 2, "both ranks have the mean")
# %%
with exercise.check("mean", "more ranks", points=3, hidden=True) as student:
    size = student.random.randint(3, 4)
    tensors = [torch.rand(3, generator=student.generator) for _ in range(size)]
    run = student.ranks("mean", [[tensor] for tensor in tensors])
    expected = torch.stack(tensors).mean(0)
    student.close_to(run.values, [expected] * size, "all ranks have the mean")
    sent = [run.sent(rank) for rank in range(size)]
    student.equal(sent, [12] * size, "each rank sends its tensor once")
# %% [markdown]
# ## 2. Bytes (2 points)
# %%
# answer: guess_bytes
guess_bytes = None
### BEGIN SOLUTION
guess_bytes = 4000
### END SOLUTION
# %%
with exercise.check("guess_bytes", "the bytes of 1,000 numbers", points=2) as student:
    size = 1000 * torch.ones(1).element_size()
    student.equal(student.value("guess_bytes"), size, "each number has 4 bytes")
# %% [markdown]
# ## 3. A sum (4 points)


# %%
# answer: total
def total(numbers):
    """The sum of a list."""
    ### BEGIN SOLUTION
    return sum(numbers)
    ### END SOLUTION


# %%
with exercise.check("total", "three numbers", points=1) as student:
    student.close_to(student.call("total", [1.0, 2.0, 3.0]), 6.0, "it is the sum")
# %%
with exercise.check("total", "other numbers", points=3, hidden=True) as student:
    numbers = [student.random.random() for _ in range(student.random.randint(4, 9))]
    student.close_to(student.call("doubled", numbers), 2 * sum(numbers), "it is the sum")
