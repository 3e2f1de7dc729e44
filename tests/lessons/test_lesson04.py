"""Lesson 04: ranks that a script spawns learn what one GPU learns; launch.call works."""

import os
import sys

import pytest
import torch
import warm
from commands import ROOT, SILENT_DDP, planted, run, run_script

from multigpu import launch, prove

PAGE = ROOT / "lessons" / "04-ddp-spawn"
SCRIPT = ROOT / "scripts" / "PT_CNN_DDPSpawn.py"


def proof(script, data) -> prove.Proof:
    """35 images in batches of 8: the last batch has 3, and the sampler repeats an image."""
    words = [str(script), "--data", str(data), "--batch-size", "8", "--epochs", "2"]
    return prove.run(words, gpus=2, steps=6, timeout=100)


@pytest.mark.long
@pytest.mark.slow
def test_two_spawned_ranks_learn_what_one_gpu_learns(in_forks, few_digits):
    found = proof(SCRIPT, few_digits())
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_without_an_all_reduce_the_proof_fails(in_forks, few_digits, tmp_path):
    found = proof(planted(tmp_path, "PT_CNN_DDPSpawn", SILENT_DDP), few_digits())
    assert found.verdict == "fails", str(found)
    assert "step with their own gradients" in found.line


# ---- the smallest program, and what mp.spawn does not do ----


def test_two_processes_add_up_their_numbers():
    done = run_script(PAGE / "add_up.py")
    assert done.returncode == 0, done.stdout
    assert done.stdout == "rank 0 of 2: the sum of 10 and 11 is 21\n"


def test_a_group_without_a_store_needs_variables_that_mp_spawn_does_not_set(tmp_path):
    text = (PAGE / "add_up.py").read_text()
    group = "store=store, rank=rank, world_size=world_size"
    assert text.count(group) == 1
    path = tmp_path / "add_up.py"
    path.write_text(text.replace(f", {group}", ""))
    done = run(sys.executable, path)
    assert done.returncode == 1
    assert "environment variable RANK expected, but not set" in done.stdout


@pytest.mark.slow
def test_mp_spawn_cannot_find_a_function_of_a_cell():
    """The last line of the process is that of unpickling the function elsewhere."""
    define = "def hello(rank):\n    pass\n"
    spawned = cell(f"import torch\n{define}torch.multiprocessing.spawn(hello, nprocs=2)")
    assert spawned.returncode == 1
    assert "ProcessExitedException: process " in spawned.stdout
    pickled = run(sys.executable, "-c", f"import pickle\n{define}print(pickle.dumps(hello))")
    load = f"import pickle; pickle.loads({pickled.stdout.strip()})"
    (line,) = run(sys.executable, "-c", load).stdout.splitlines()[-1:]
    assert "Can't get attribute 'hello' on <module '__main__'" in line
    assert line in spawned.stdout.splitlines()


# ---- launch.call ----


def cell(text: str):
    """Run a text as a notebook runs a cell: __main__ has no file."""
    return run(warm.python(), "-c", text, timeout=60)


def test_a_function_of_a_cell_and_what_it_uses():
    done = cell(
        "import torch\n"
        "from multigpu import launch\n"
        "factor = 3\n"
        "def times(x):\n"
        "    world = launch.find_world()\n"
        "    return world.rank, world.size, factor * x\n"
        "print(launch.call(times, 2, x=torch.ones(1)))"
    )
    assert done.stdout == "[(0, 2, tensor([3.])), (1, 2, tensor([3.]))]\n"


def test_a_rank_that_fails_is_reported_and_the_others_end():
    done = cell(
        "import time\n"
        "from multigpu import launch\n"
        "def work():\n"
        "    if launch.find_world().rank == 1:\n"
        "        raise ValueError('planted')\n"
        "    time.sleep(600)\n"
        "try:\n"
        "    launch.call(work, 2)\n"
        "except RuntimeError as error:\n"
        "    print('caught:', error)"
    )
    assert done.returncode == 0, done.stdout
    (caught,) = (line for line in done.stdout.splitlines() if line.startswith("caught: "))
    assert "rank 1" in caught
    assert "ValueError: planted" in done.stdout


def test_arguments_are_copies():
    weights = torch.ones(3)
    launch.call(torch.nn.init.zeros_, 2, weights)
    assert torch.equal(weights, torch.ones(3))


def test_what_cannot_be_sent():
    with pytest.raises(TypeError, match="pickle"):
        launch.call(print, 1, os.scandir("."))
