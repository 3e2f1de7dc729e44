"""Exercises: a student's answer runs in a process of its own, and checks call its functions.

The notebook of an exercise begins with

    exercise = Exercise("05-ddp-cluster")

and a check is a cell such as

    with exercise.check("shard", "each row has one rank", points=2) as student:
        rows = [student.call("shard", 10, 3, rank) for rank in range(3)]
        student.equal(sorted(sum(rows, [])), list(range(10)), "each row has one rank")

What the student's process returns is plain data; nothing that it measures is believed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multigpu.exercise.exercise import Exercise
    from multigpu.exercise.ranks import gate

__all__ = ["Exercise", "gate"]


def __getattr__(name: str) -> object:
    # Commands that read notebooks need no torch, whose import takes seconds.
    if name == "Exercise":
        from multigpu.exercise.exercise import Exercise

        return Exercise
    if name == "gate":
        from multigpu.exercise.ranks import gate

        return gate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
