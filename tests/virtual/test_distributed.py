"""Messages and collectives of ranks with two virtual GPUs each: times, memory, and the end.

tests/lessons has the numbers of DDP over two devices (test_same_curve) and of torch's
pipelines (test_lesson03) on virtual GPUs.
"""

from pathlib import Path

import pytest
from commands import run
from virtual_ranks import run_ranks

from multigpu import LINKS
from multigpu.virtual.sim.network import Network, collective_seconds
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

pytestmark = pytest.mark.slow

WORKER = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

what = sys.argv[3]
first, second = control.start(2)
join()


def compute(device, times):
    for _ in range(times):
        product = torch.ones(1000, 1000, device=device) @ torch.ones(1000, 1000, device=device)
    return product


def events(*names):
    return [event for event in control.timeline().events if event.name in names]


results = {}
if what == "messages":
    s = torch.ones(1, device=first)
    dist.barrier()  # else the isend waits for rank 1, and rank 1's first all-reduce for rank 0
    if rank == 0:
        x = torch.ones(10**6, device=first)
        work = dist.isend(x, 1)
        x.zero_()  # nothing waits for the message: not this, and not the all-reduce
        dist.all_reduce(s)
        work.wait()
    else:
        dist.all_reduce(s)
        compute(first, times=10)
        x = torch.zeros(10**6, device=first)
        results["called"] = control.elapsed()
        dist.recv(x, 0)
        results["received"] = x.sum().item()
    results["spans"] = [(event.start, event.end) for event in events("send", "recv")]
elif what == "memory":
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = DDP(nn.Linear(100, 100).to(first))
    stage = nn.Linear(100, 100).to(second)
    run = Schedule1F1B(PipelineStage(stage, rank, 2, second), 4, loss_fn=nn.MSELoss())
    x = torch.ones(8, 100)
    results["allocated"] = []
    for _ in range(5):
        model(x.to(first)).sum().backward()
        run.step(x.to(second)) if rank == 0 else run.step(target=x.to(second))
        last = dist.all_reduce(summed := torch.ones(100, device=first), async_op=True)
        allocated = [torch.vgpu.memory_allocated(device) for device in (first, second)]
        results["allocated"].append(allocated)
    results["result"] = (last.result()[0] - summed).abs().sum().item()
elif what == "late":
    if rank == 1:
        compute(first, times=10)
    control.elapsed()
    results["before"] = control.elapsed()
    work = dist.all_reduce(torch.ones(10**6, device=first), async_op=True)
    product = compute(first, times=1)
    work.wait()
    event = next(e for e in control.timeline().events if e.kind == "collective")
    results["start"], results["end"] = event.start, event.end
    # An operation that reads without `wait` gets the sum, and starts after the collective.
    again = torch.full((10**6,), rank + 1.0, device=second)
    dist.all_reduce(again, async_op=True)
    results["sum"] = (again * 1).sum().item()
    on_second = [e for e in control.timeline().events if e.device == 1]
    results["collective ends"] = next(e.end for e in on_second if e.kind == "collective")
    results["read starts"] = next(e.start for e in on_second if e.name == "mul")
    dist.barrier()
    results["after barrier"] = control.elapsed()
    try:
        dist.all_gather([torch.empty(1, device=gpu) for gpu in (first, second)], product[0])
    except RuntimeError as error:
        results["error"] = str(error)
dist.barrier()
print(json.dumps(results))
dist.destroy_process_group()
"""


def two_processes(what: str, tmp_path: Path) -> list[dict]:
    """Run WORKER on two ranks, each with two virtual GPUs, and return their results."""
    return run_ranks(WORKER, 2, tmp_path, what)


def test_a_message_takes_the_same_time_on_both_sides(tmp_path):
    """It starts when both ranks have called, as with NCCL; it has the values at the call."""
    sender, receiver = two_processes("messages", tmp_path)
    start, end = sender["spans"][0]
    assert sender["spans"] == receiver["spans"] and len(sender["spans"]) == 1
    assert receiver["received"] == 1e6
    assert start >= receiver["called"] > 0
    link = LINKS["NVLink2"]
    assert end - start == pytest.approx(link.latency + 4e6 / link.bandwidth)


def test_what_was_sent_is_given_back(tmp_path):
    """The group keeps its last works, not their tensors: memory does not grow."""
    for rank in two_processes("memory", tmp_path):
        assert rank["allocated"][1] == rank["allocated"][4] and rank["result"] == 0


AT_THE_END = """
import atexit, glob, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def gloo_threads():
    names = [open(name).read() for name in glob.glob("/proc/self/task/*/comm")]
    return sum("gloo" in name for name in names)

# The import registers what ends the threads: it is called before this.
atexit.register(lambda: print("at the end", gloo_threads()))
from multigpu.virtual import control
first, second = control.start(2)
models = []
for is_destroyed in (True, False):
    dist.init_process_group("vgpu", store=dist.HashStore(), rank=0, world_size=1)
    models.append(DDP(torch.nn.Linear(2, 2).to(first)))
    models[-1](torch.ones(1, 2, device=first)).sum().backward()
    print("before", gloo_threads())
    if is_destroyed:
        dist.destroy_process_group()
"""


def test_no_thread_of_gloo_is_left_when_python_ends():
    """A thread that then frees a tensor aborts the process, once in some hundred runs."""
    output = run("python", "-c", AT_THE_END).stdout
    assert output.count("before") == 2 and "before 0" not in output, output
    assert "at the end 0" in output, output


KILLED = """
import os, signal, tempfile
from pathlib import Path

here = Path(__file__).parent
tempfile.tempdir = str(here)

control.start(1)
join()
dist.new_group([0, 1])
dist.barrier()
folders = len(list(here.glob("multigpu-ranks-*")))
dist.barrier()
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
print(json.dumps(folders))
"""


def test_the_files_of_killed_ranks_are_removed_by_the_next_run(tmp_path):
    """Those of the ranks that run stay: the second group's start leaves the first one's."""
    with pytest.raises(AssertionError):
        run_ranks(KILLED, 2, tmp_path, "killed")
    assert len(list(tmp_path.glob("multigpu-ranks-*"))) == 2
    assert run_ranks(KILLED, 2, tmp_path, "ends") == [2, 2]
    assert not list(tmp_path.glob("multigpu-ranks-*"))


def test_a_collective_starts_when_the_last_rank_arrives(tmp_path):
    zero, one = two_processes("late", tmp_path)
    assert one["before"] > 1.3 * zero["before"]
    assert zero["start"] == one["start"] >= one["before"] and zero["end"] == one["end"]
    ring = collective_seconds("allreduce", 4e6, Network(LINKS["NVLink2"]).group(2))
    assert zero["end"] - zero["start"] == pytest.approx(ring + KERNEL_OVERHEAD)
    for rank in (zero, one):
        assert rank["sum"] == 3e6
        assert rank["read starts"] >= rank["collective ends"]
        assert "one device" in rank["error"] and "vgpu:0 and vgpu:1" in rank["error"]
    assert zero["after barrier"] == pytest.approx(one["after barrier"], abs=1e-9)
