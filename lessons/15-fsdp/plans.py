"""Simulated times of plans for the exercise's question 4: where its limits of time come from.

python lessons/15-fsdp/plans.py              about 4 minutes
python lessons/15-fsdp/plans.py --changes 0  without the search: about 1 minute
"""

import argparse
import random
import re

from multigpu.grading import solution


def of_numbers(blocks, group, ahead, keep, late=0):
    """A plan by four numbers.

    ahead  the blocks that are gathered before they are needed
    keep   the last blocks, which keep their weights after forward
    late   the blocks that backward is ahead of reduce
    """
    steps, whole = [], set()
    for block in range(blocks):
        for near in range(block, min(blocks, block + ahead + 1)):
            if near not in whole:
                whole.add(near)
                steps.append(("gather", near))
        steps.append(("forward", block))
        if block < blocks - keep:
            whole.remove(block)
            steps.append(("free", block))
    for block in range(blocks - 1, -1, -1):
        for near in range(block, max(-1, block - ahead - 1), -1):
            if near not in whole:
                whole.add(near)
                steps.append(("gather", near))
        whole.remove(block)
        steps += [("backward", block), ("free", block)]
        if block + late < blocks:
            steps.append(("reduce", block + late))
    steps += [("reduce", block) for block in reversed(range(late))]
    return {"group": group, "steps": steps}


def cells(lesson="15"):
    """The names of the exercise's setup, its given cells and its solution of question 4."""
    exercise = solution.find(lesson)
    [answer] = (question for question in exercise.questions if question.name == "plan")
    names = {}
    for text in [*exercise.sources("setup"), *exercise.sources("given"), answer.answer]:
        # Without the process for answers, which is not needed here.
        exec(re.sub(r"^exercise = .*", "", text, flags=re.MULTILINE), names)
    return names


def seconds(names, plan, cluster):
    """The simulated time; infinite for a plan that does not fit, or fails."""
    try:
        return names["measure"](plan, cluster)[0]
    except names["PlanError"]:
        return float("inf")


def by_numbers(names, cluster):
    """(seconds, group, ahead, keep, late) of all plans by numbers that fit, fastest first."""
    every = [
        (group, ahead, keep, late)
        for group in (2, 4, 8, 16)
        for ahead in (0, 1, 2)
        for keep in range(cluster["blocks"] + 1)
        for late in (0, 1)
    ]
    plans = [
        (seconds(names, of_numbers(cluster["blocks"], *numbers), cluster), *numbers)
        for numbers in every
    ]
    return sorted(plan for plan in plans if plan[0] < float("inf"))


def search(names, plan, cluster, changes):
    """The time of the fastest plan that a number of random changes to the steps finds."""
    draw = random.Random(0)
    best = seconds(names, plan, cluster)
    for _ in range(changes):
        steps = list(plan["steps"])
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(steps))
            step = steps.pop(place)
            steps.insert(max(0, place + draw.randint(-6, 6)), step)
        other = plan | {"steps": steps}
        time = seconds(names, other, cluster)
        if time <= best:
            plan, best = other, time
    return best


def main(changes):
    names = cells()
    cluster = names["CLUSTER"]
    plans = by_numbers(names, cluster)
    rows = {
        "naive": seconds(names, names["naive"](cluster), cluster),
        "groups of 16, nothing gathered ahead": min(
            time for time, group, ahead, *_ in plans if group == 16 and not ahead
        ),
        "groups of 16, gathered ahead": min(
            time for time, group, ahead, *_ in plans if group == 16 and ahead
        ),
        "groups of 8, nothing gathered ahead": min(
            time for time, group, ahead, *_ in plans if group == 8 and not ahead
        ),
        "groups of 8, gathered ahead, no block kept": min(
            time for time, group, ahead, keep, _ in plans if group == 8 and ahead and not keep
        ),
        f"the fastest of {len(plans)} by numbers": plans[0][0],
        "the solution": seconds(names, names["plan"](cluster), cluster),
    }
    if changes:
        best = of_numbers(cluster["blocks"], *plans[0][1:])
        rows[f"after {changes:,} random changes"] = search(names, best, cluster, changes)
    for name, time in rows.items():
        print(f"{name:<45}{time:7.3f} s")
    for memory in (12, 40):
        for blocks in (6, 7, 9, 10, 11, 12):
            room = int((memory + blocks / 2) * 2**30)
            other = cluster | {"blocks": blocks, "memory": room}
            naive = seconds(names, names["naive"](other), other)
            mine = seconds(names, names["plan"](other), other)
            ahead = seconds(names, of_numbers(blocks, 16, 1, 1), other)
            print(
                f"{blocks:2} blocks, {room / 2**30:4.1f} GiB: of naive's {naive:.2f} s the "
                f"solution takes {mine / naive:.2f}, gathering ahead {ahead / naive:.2f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--changes", type=int, default=3000)
    main(parser.parse_args().changes)
