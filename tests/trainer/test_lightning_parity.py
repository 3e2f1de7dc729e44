"""The same user code gives what Lightning gives: every loss, weight, metric and CSV row."""

import os
import subprocess

import lightnings
import pytest
import torch
import trainer_user
import warm
from commands import ROOT, clean_environment

import multigpu.trainer as ours

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def start(which, folder):
    """The script, which trains on two ranks; not waited for."""
    command = [warm.python(), ROOT / "tests" / "support" / "trainer_user.py", which, folder]
    environment = clean_environment(
        PYTHONPATH=f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """case → [(ours, theirs) of rank 0, of rank 1].

    Started now, read when the tests on one device are done.
    """
    folder = tmp_path_factory.mktemp("ddp")
    programs = {}

    def results():
        for which in trainer_user.LIBRARIES:
            if which not in programs:
                programs[which] = start(which, folder)
            reported, _ = programs[which].communicate(timeout=200)
            assert programs[which].returncode == 0, reported
        return [
            [
                torch.load(folder / f"{which}{rank}.pt", weights_only=False)
                for which in trainer_user.LIBRARIES
            ]
            for rank in (0, 1)
        ]

    programs["lightning"] = start("lightning", folder)  # the slow one
    found = []

    def get():
        if not found:
            found.extend(results())
        return found

    yield get
    for program in programs.values():
        if program.poll() is None:
            program.terminate()


def numbers(row):
    return {name: float(text) for name, text in row.items() if text}


def agree(mine, theirs):
    """Within 1e-6, at every step."""
    assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
    assert mine["at"] == theirs["at"]
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(mine["weights"][name], weight, rtol=0, atol=1e-6)
    assert mine["metrics"] == pytest.approx(theirs["metrics"], abs=1e-6)
    assert [step for _, step in mine["ends"]] == [step for _, step in theirs["ends"]]
    outputs = [
        [loss for loss, _ in each["ends"] if loss is not None] for each in (mine, theirs)
    ]
    assert outputs[0] == pytest.approx(outputs[1], abs=1e-6)
    assert [numbers(row) for row in mine["rows"]] == [
        pytest.approx(numbers(row), abs=1e-6) for row in theirs["rows"]
    ]


@pytest.mark.parametrize("case", [*trainer_user.CASES, *trainer_user.ALONE])
def test_on_one_device_as_lightning(two_ranks, tmp_path, case):
    lightning = lightnings.package()
    mine = trainer_user.train(ours, case, tmp_path / "multigpu")
    theirs = trainer_user.train(lightning, case, tmp_path / "lightning")
    assert mine["losses"] and (theirs["rows"] or case == "fast_dev_run")
    agree(mine, theirs)


@pytest.mark.parametrize("case", trainer_user.TWO)
def test_on_two_ranks_as_lightning(two_ranks, case):
    ranks = two_ranks()
    assert ranks[0][0][case]["losses"] != ranks[1][0][case]["losses"], (
        "each rank has data of its own"
    )
    for mine, theirs in ranks:
        agree(mine[case], theirs[case])


def test_the_cases_differ_from_each_other(tmp_path):
    """A case that does not change the run shows nothing."""
    plain = trainer_user.train(ours, "plain", tmp_path)["losses"]
    same = {
        "validate twice an epoch",
        "validate every 2 batches",
        "seldom logged",
        "two val loaders",
    }
    for case in {**trainer_user.CASES, **trainer_user.ALONE}.keys() - same - {"plain"}:
        assert trainer_user.train(ours, case, tmp_path)["losses"] != plain, case
