"""Mistakes in a notebook, in a real kernel: one sentence each, and the next run works."""

from textwrap import indent

import psutil
import pytest
from commands import ROOT, free_ports
from kernels import kernel, wait_until

pytestmark = pytest.mark.slow

RANK = """\
import os, time
import torch.distributed as dist
print("rank", os.environ["RANK"], "runs as", os.getpid(), flush=True)
dist.init_process_group("gloo")
dist.barrier()
print("all ranks run", flush=True)
time.sleep(600 if os.environ["RANK"] == "0" else 0)
dist.barrier()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A kernel in notebooks/ in which the first cell has run."""
    with kernel(ROOT / "notebooks") as started:
        setup = started.run("from multigpu import lesson; lesson.setup('02-data-parallel')")
        assert not setup.error
        yield started


@pytest.fixture(scope="module")
def prepared():
    """A kernel whose ranks are forks of a server."""
    with kernel(ROOT / "notebooks") as started:
        setup = "from multigpu import launch, lesson; lesson.setup('04-ddp-spawn', ranks=True)"
        assert not started.run(setup).error
        yield started


def one_sentence(cell, *facts: str) -> None:
    """The error is shown without a traceback, in lines that fit, and names the facts."""
    text = " ".join(cell.shown)
    assert text.removeprefix("error: ") == cell.error or cell.name == "NameError"
    assert len(cell.shown) <= 3 and all(len(line) <= 95 for line in cell.shown)
    for fact in facts:
        assert fact in text


def ended(text: str) -> bool:
    """Whether the ranks that have printed their process ids end within seconds."""
    ids = [int(line.split()[-1]) for line in text.splitlines() if "runs as" in line]
    assert len(ids) == 2, text

    def gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return wait_until(lambda: all(map(gone, ids)), 2)


# ---- guesses and order ----------------------------------------------------------------------


def test_a_guess_that_is_missing_or_no_number(notebook):
    assert not notebook.run("guess_x = None").error
    one_sentence(notebook.run("lesson.need(guess_x)\nprint('ran')"), "No guess yet", "None")
    assert not notebook.run("guess_x = '1.8'").error
    one_sentence(notebook.run("lesson.need(guess_x)"), "'1.8'", "a number")
    assert not notebook.run("guess_x = 2").error
    cell = notebook.run("lesson.need(guess_x)\nlesson.compare('it', guess_x, 1)")
    assert "guess 2" in cell.printed and not cell.error


def test_a_guess_whose_cell_was_not_run(notebook):
    one_sentence(notebook.run("lesson.need(guess_never_run)"), "guess_never_run", "cell above")


def test_a_cell_run_out_of_order(notebook):
    cell = notebook.run("first_gpu + 1")
    assert cell.name == "NameError" and "Run All Above" in cell.shown[-1]
    cell = notebook.run("import json.tool as t; exec('undefined', {})")
    assert cell.name == "NameError" and "Run All Above" not in "".join(cell.shown)


@pytest.mark.parametrize(
    "read", ["Path('results/none.json').read_text()", "open('results/none.json')"]
)
def test_a_file_that_a_cell_above_writes(notebook, read):
    cell = notebook.run(f"from pathlib import Path\n{read}")
    assert cell.name == "UserError"
    one_sentence(cell, "results/none.json", "Run All Above")


def test_the_first_cell_run_twice(notebook):
    again = "from multigpu import lesson; lesson.setup('02-data-parallel')"
    assert not notebook.run(again).error
    assert notebook.run("!echo works").printed.strip() == "works"


# ---- commands -------------------------------------------------------------------------------


def test_a_command_that_fails_stops_the_notebook(notebook):
    cell = notebook.run("!echo the cause; exit 3\nprint('goes on')")
    assert cell.printed.strip() == "the cause"
    one_sentence(cell, "exit code 3")
    one_sentence(notebook.run("!kill -9 $$"), "signal 9")
    cell = notebook.run("lines = !echo the cause; exit 3\nprint('goes on')")
    assert "goes on" not in cell.printed
    one_sentence(cell, "exit status 3")
    assert not notebook.run("!false || true").error


def test_a_command_gets_the_cells_variables(notebook):
    assert notebook.run("x = 3\n!echo {x + 1} $x").printed.strip() == "4 3"
    assert notebook.run("def f():\n    y = 5\n    !echo {y}\nf()").printed.strip() == "5"


def test_torchrun_interrupted(notebook, tmp_path):
    """Each rank is in a session of its own: Ctrl-C in the terminal does not reach it."""
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
    cell = notebook.run(f"!{torchrun} {tmp_path}/rank.py", interrupt_at="all ranks run")
    one_sentence(cell, "Interrupted", "ended")
    assert ended(cell.printed)
    assert "Traceback" not in cell.printed
    assert notebook.run("!echo works").printed.strip() == "works"


def test_an_import_is_not_left_half_done(notebook, tmp_path):
    """The interrupt comes when the import has ended, and the module can be used."""
    (tmp_path / "slow_module.py").write_text(
        "import time\nprint('imports', flush=True)\ntime.sleep(1)\ncomplete = True\n"
    )
    source = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport slow_module\n"
    cell = notebook.run(source + "import time\ntime.sleep(60)", interrupt_at="imports")
    assert cell.name == "KeyboardInterrupt"
    cell = notebook.run("import slow_module\nprint(slow_module.complete)")
    assert cell.printed.strip() == "True"


# ---- ranks that a cell starts ---------------------------------------------------------------


def test_forked_ranks_have_this_folder_and_path(prepared, tmp_path):
    (tmp_path / "only_here.py").write_text("answer = 42\n")
    source = f"""\
import os, sys
sys.path.insert(0, {str(tmp_path)!r})
os.chdir({str(tmp_path)!r})
def found():
    import only_here
    return only_here.answer, os.getcwd()
print(launch.call(found, 1))
"""
    assert prepared.run(source).printed.strip() == f"[(42, {str(tmp_path)!r})]"


def test_ranks_are_forks_after_a_step_on_virtual_gpus(prepared):
    """An optimizer's step there makes torch set a variable, which must not end the forks."""
    step = """\
import os, torch
from multigpu import launch
from multigpu.virtual import control
from multigpu.launch import prefork
with control.running(1) as (gpu,):
    weight = torch.ones(2, device=gpu, requires_grad=True)
    weight.sum().backward()
    torch.optim.Adam([weight]).step()
from torch._inductor.runtime.cache_dir_utils import cache_dir
cache_dir()
print(prefork.SET_BY_TORCH in os.environ, prefork.start_method())
"""
    assert prepared.run(step).printed.split()[-2:] == ["True", "forkserver"]
    forked = "print(launch.call(lambda: os.getppid(), 2))"
    first, second = eval(prepared.run(forked).printed)
    assert first == second == eval(prepared.run(forked).printed)[0]


def test_a_changed_variable_reaches_the_ranks(prepared):
    source = """\
import os, torch
threads = os.environ.get("OMP_NUM_THREADS")
os.environ["OMP_NUM_THREADS"] = "2"
print(launch.call(torch.get_num_threads, 2))
if threads is None:
    del os.environ["OMP_NUM_THREADS"]
else:
    os.environ["OMP_NUM_THREADS"] = threads
"""
    assert prepared.run(source).printed.strip() == "[2, 2]"


@pytest.mark.parametrize("which", ["notebook", "prepared"])
def test_launch_call_interrupted(which, request):
    notebook = request.getfixturevalue(which)
    source = f"def wait():\n{indent(RANK, '    ')}\nlaunch.call(wait, 2)"
    assert not notebook.run("from multigpu import launch").error
    cell = notebook.run(source, interrupt_at="all ranks run")
    one_sentence(cell, "Interrupted", "2 ranks")
    assert ended(cell.printed)
    assert "Traceback" not in cell.printed
    again = notebook.run("print(launch.call(lambda: launch.find_world().rank, 2))")
    assert again.printed.strip() == "[0, 1]" and not again.error


def test_mp_spawn_interrupted(notebook, tmp_path):
    """torch's own mp.spawn leaves a rank in a collective running."""
    variables = "MASTER_ADDR='127.0.0.1', MASTER_PORT=port, WORLD_SIZE='2', RANK=str(rank)"
    (tmp_path / "spawned.py").write_text(
        f"def work(rank, port):\n    import os\n    os.environ.update({variables})\n"
        + indent(RANK, "    ")
    )
    (port,) = free_ports(1)
    source = f"import sys, torch\nsys.path.insert(0, {str(tmp_path)!r})\nimport spawned\n"
    source += f"torch.multiprocessing.spawn(spawned.work, ('{port}',), 2)"
    cell = notebook.run(source, interrupt_at="all ranks run")
    one_sentence(cell, "Interrupted", "(2)")
    assert ended(cell.printed)


@pytest.mark.parametrize("ranks", [False, True])
def test_the_first_ranks_of_a_kernel_interrupted(ranks):
    """They, or their server, import torch, and print nothing about the interrupt.

    multiprocessing also starts its resource tracker, and then unblocks SIGINT: the
    server would end. (Ranks without a server end so soon that they seldom print anyway.)
    """
    source = f"""\
import threading, torch
from multigpu import launch, lesson
lesson.setup("04-ddp-spawn", ranks={ranks})
threading.Timer(0.3, print, ["starting"]).start()
launch.call(print, 2)
"""
    with kernel(ROOT / "notebooks") as started:
        cell = started.run(source, interrupt_at="starting")
        one_sentence(cell, "Interrupted")
        assert "Traceback" not in cell.printed
        assert wait_until(lambda: len(started.descendants()) == ranks, 2), "the server alone"
        again = started.run("print(launch.call(lambda: launch.find_world().rank, 2))")
        assert again.printed.strip() == "[0, 1]"


def test_virtual_gpus_in_an_interrupted_cell(notebook):
    busy = "while True:\n    (torch.ones(64, 64, device=gpu) @ torch.ones(64, 64, device=gpu))"
    cell = notebook.run(
        f"import multigpu, torch, time\ngpu, other = multigpu.gpus(2)\nprint('busy')\n{busy}",
        interrupt_at="busy",
    )
    assert cell.name == "KeyboardInterrupt"
    # the cell again: the virtual GPUs still run
    again = "gpu, other = multigpu.gpus(2)\nprint(torch.ones(2, device=gpu).sum().item())"
    cell = notebook.run(again)
    assert not cell.error and cell.printed.splitlines()[-1] == "2.0"
    one_sentence(
        notebook.run("from multigpu.virtual import control\ncontrol.start(2)"),
        "control.stop()",
    )
    assert not notebook.run("control.stop()\ncontrol.start(2)\ncontrol.stop()").error
    # in a `with` block, which stops them
    block = "with control.running(2) as (gpu, other):\n" + indent(
        f"print('busy')\n{busy}", "    "
    )
    cell = notebook.run(block, interrupt_at="busy")
    assert cell.name == "KeyboardInterrupt"
    assert not notebook.run("control.start(2)\ncontrol.stop()").error
