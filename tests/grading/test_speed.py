"""Lesson 15's question about speed: what a plan takes, and what is no plan."""

import runpy
import subprocess
from types import SimpleNamespace

import pytest
import torch
import warm
from commands import ROOT, clean_environment

from multigpu.grading import solution

PLANS = ROOT / "lessons" / "15-fsdp" / "plans.py"


@pytest.fixture(scope="module")
def plans():
    """plans.py."""
    return SimpleNamespace(**runpy.run_path(str(PLANS)))


@pytest.fixture(scope="module")
def names(plans):
    """The names of the exercise's cells."""
    return plans.cells()


def test_the_points_lie_between_the_times_of_known_plans(plans, names):
    """No known plan is within 1% of a limit: the next version's times may differ a little."""
    cluster = names["CLUSTER"]
    # Of groups of 16 in CLUSTER, four blocks of weights fit beside what a step needs.
    by_points = {
        0: [(16, 0, 0), (16, 0, 4)],
        1: [(16, 1, 1), (16, 1, 4), (8, 0, 0), (8, 0, 1)],
        2: [(8, 1, 0)],
        3: [(8, 1, 1), (8, 1, 2)],
    }
    limits = (4.2, 3.1, 2.9)
    for points, known in by_points.items():
        for numbers in known:
            time = plans.seconds(names, plans.of_numbers(8, *numbers), cluster)
            assert sum(time <= limit for limit in limits) == points, numbers
            assert all(abs(time / limit - 1) > 0.01 for limit in limits), (numbers, time)


@pytest.mark.slow
def test_a_time_is_the_same_to_the_digit_on_a_busy_machine(names):
    """In two other processes with other threads, which share one core."""
    cluster = names["CLUSTER"]
    seconds, peak, _ = names["measure"](names["plan"](cluster), cluster)
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        f"import runpy; names = runpy.run_path({str(PLANS)!r})['cells']()\n"
        "found = names['measure'](names['plan'](names['CLUSTER']), names['CLUSTER'])\n"
        "print(repr(found[:2]))"
    )
    for found in [
        subprocess.Popen(
            [warm.python(), "-c", code],
            env=clean_environment(OMP_NUM_THREADS=threads),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for threads in (1, 2)
    ]:
        printed, _ = found.communicate(timeout=240)
        assert printed.strip() == repr((seconds, peak))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda steps: steps[1:], "step 1, forward 0: the block has no whole weights"),
        (lambda steps: steps[:1] + steps, "the block has whole weights already"),
        (
            lambda steps: steps[:3] + steps,
            "step 5, forward 0: the block has an output already",
        ),
        (lambda steps: steps[3:], "step 2, forward 1: the block has no input"),
        (lambda steps: steps[:-1], "block 0 is never reduced: its weights do not learn"),
        (lambda steps: [*steps, steps[-1]], "reduce 0: the block has no gradients of its own"),
        (lambda steps: [s for s in steps if s != ("free", 0)][:-1], "whole weights already"),
        (lambda steps: [*steps, ("gather", 3)], "block 3 is not free at the end"),
        (lambda steps: [*steps, ("free", 3)], "free 3: the block has no whole weights"),
        (
            lambda steps: [s for s in steps if s != ("backward", 7)],
            "reduce 7: the block has no gradients of its own",
        ),
        (
            lambda steps: steps[:24] + steps[28:],
            "backward 6: the block has no gradient of its output",
        ),
        (lambda steps: [("send", 0), *steps], "step 1 is ('send', 0): there is no such step"),
        (lambda steps: [("gather", -1), *steps], "there is no such step, or no such block"),
        (lambda steps: [("gather", True), *steps], "give a pair"),
        (lambda steps: [("gather", torch.ones(3)), *steps], "give a pair"),
        (lambda steps: [("gather", 0, 1), *steps], "give a pair"),
        (lambda steps: steps * 5, "the steps are a list of at most 160"),
        (lambda steps: None, "the steps are a list"),
    ],
)
def test_what_is_no_plan_gets_a_sentence(names, change, says):
    cluster = names["CLUSTER"]
    plan = names["naive"](cluster)
    wrong = plan | {"steps": change(plan["steps"])}
    with pytest.raises(names["PlanError"]) as error:
        names["measure"](wrong, cluster)
    assert says in str(error.value)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    "wrong", [None, [], {}, {"group": 16}, {"group": 16, "steps": [], "seconds": 1.0}]
)
def test_a_plan_has_two_keys(names, wrong):
    expected = 'a plan is a dict with the keys "group" and "steps"'
    assert names["problem"](wrong, names["CLUSTER"]) == expected


@pytest.mark.parametrize("group", [0, -8, 3, 32, 8.0, True, "8", None])
def test_a_group_divides_the_ranks(names, group):
    plan = names["naive"](names["CLUSTER"]) | {"group": group}
    assert "a number that divides 16" in names["problem"](plan, names["CLUSTER"])


def test_a_plan_that_does_not_fit_is_none(plans, names):
    cluster = names["CLUSTER"]
    for numbers in ((16, 1, 8), (4, 1, 1)):
        with pytest.raises(names["PlanError"], match="it does not fit: CUDA out of memory"):
            names["measure"](plans.of_numbers(8, *numbers), cluster)
    roomy = cluster | {"memory": 40 * 2**30}
    seconds, peak, _ = names["measure"](plans.of_numbers(8, 16, 1, 8), roomy)
    assert cluster["memory"] < peak < roomy["memory"] and seconds < 2.862


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_all_ranks_have_the_gradients_of_one_gpu(plans, names, group):
    for numbers in ((0, 0), (1, 1), (2, 8, 1)):
        names["check_numbers"](plans.of_numbers(8, group, *numbers), names["CLUSTER"])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("middle > 0", "middle > -1"),
        ("torch.addmm(outer, inner, up)", "inner @ up"),
        ("for rank in ranks]).mean(0)", "for rank in ranks]).sum(0)"),
    ],
)
def test_numbers_show_a_step_that_computes_something_else(names, right, wrong):
    """The proof can fail: what the ranks do is compared with autograd's gradients."""
    text = "\n".join(solution.find("15").sources("setup"))
    assert text.count(right) == 1
    own = dict(names)
    exec(text.replace(right, wrong).split('exercise = Exercise("15-fsdp")')[1], own)
    with pytest.raises(own["PlanError"], match=r"gradients of block \d are others"):
        own["check_numbers"](names["plan"](names["CLUSTER"]), names["CLUSTER"])
