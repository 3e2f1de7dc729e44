"""gloo's threads end before Python does.

Otherwise a thread may drop a tensor while Python is finalizing, and the process aborts:
"terminate called without an active exception", once in some hundred runs, more often on a busy
machine.
"""

import gc
import re
import weakref

import pytest
import torch.distributed as dist
from commands import ROOT, run, run_script

from multigpu.launch.exit import keep_groups_alive

pytestmark = pytest.mark.slow

SPAWNED = """
import atexit, glob, torch, torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank, port):
    store = dist.TCPStore("127.0.0.1", port, 2, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = DDP(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()

def print_threads():
    threads = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
    print(f"at the end {sum('gloo' in name for name in threads)}\\n", end="", flush=True)

atexit.register(print_threads)
from multigpu import launch  # after the line above: the first registered is called last

if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(train, (store.port,), 2)
"""


# Both are really started: what warm.py imports changes who refers to the group, and atexit's
# order.
def test_no_thread_of_gloo_is_left_at_the_end():
    done = run(
        "multigpu",
        "horovodrun",
        "-np",
        2,
        "python",
        ROOT / "tests" / "support" / "ending.py",
        PYTHONPATH=ROOT,
    )
    assert done.returncode == 0 and done.stdout.count("at the end 0") == 2, done.stdout
    assert all(int(number) > 0 for number in re.findall(r"before (\d+)", done.stdout))


def test_a_group_that_ddp_had_can_be_ended(tmp_path):
    """torch keeps it in functions' defaults; the script keeps DDP until `train` returns."""
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = run("python", script, PYTHONPATH=ROOT)
    assert done.stdout.count("at the end 0") == 3, done.stdout


def test_a_destroyed_group_is_kept_until_the_run_has_ended():
    """Otherwise DDP may drop the last reference, and wait for gloo while it holds the GIL."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    with keep_groups_alive():
        dist.destroy_process_group()
        gc.collect()
        assert group() is not None
    gc.collect()
    assert group() is None


@pytest.mark.parametrize(
    ("ending", "code"),
    [("UserError('lost')", 2), ("SystemExit(3)", 3), ("KeyboardInterrupt", 130)],
)
def test_what_a_failed_main_holds_is_not_freed(tmp_path, ending, code):
    """A process group that is freed would wait for gloo's threads."""
    path = tmp_path / "script.py"
    path.write_text(
        "import argparse\n"
        "from multigpu.errors import UserError\n"
        "from multigpu.launch.script import start\n"
        "class Group:\n"
        "    def __del__(self): print('freed', flush=True)\n"
        "def main(args):\n"
        "    group = Group()\n"
        f"    raise {ending}\n"
        "start(main, argparse.Namespace())\n"
    )
    done = run_script(path)
    assert done.returncode == code and "freed" not in done.stdout, done.stdout
