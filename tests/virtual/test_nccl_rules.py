"""Programs that fail or stand still with NCCL do so on virtual GPUs, and say why."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import run_script
from nccl_programs import run

from multigpu.virtual.patches import standstill
from multigpu.virtual.patches.communicator import Communicator


def test_two_ranks_on_one_gpu(results):
    """Without set_device both are on cuda:0: at the first collective of any group."""
    for found in results("""
dist.init_process_group("nccl")
print(json.dumps([error_of(dist.all_reduce, full(1))]), flush=True)
os._exit(0)
"""):
        name, _, text = found[0].partition(": ")
        assert name == "DistBackendError" and "ncclInvalidUsage" in text
        assert "Duplicate GPU detected : rank" in text


def test_device_id_connects_at_once(results):
    """Two ranks on one GPU are an error of init_process_group itself."""
    for found in results("""
found = error_of(dist.init_process_group, "nccl", device_id=torch.device("cuda:0"))
print(json.dumps(found), flush=True)
time.sleep(2)
os._exit(0)
"""):
        assert "Duplicate GPU detected" in found


def test_a_barrier_before_set_device_takes_another_gpu(processes):
    """Rank 1's barrier is on cuda:1 and its all_reduce on cuda:0, as with NCCL's guess."""
    for process in processes("""
dist.init_process_group("nccl")
dist.barrier()
dist.all_reduce(full(1))
"""):
        assert process.returncode == -signal.SIGABRT, process.stdout
        (said,) = re.findall("^  likely: .*$", process.stdout, re.MULTILINE)
        assert "a rank, not all, uses another GPU" in said and "set_device" in said


def test_a_mesh_and_a_barrier_of_a_named_gpu(results):
    """With device_id a mesh splits the group: init_device_mesh has split_group's name, too."""
    found = results("""
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
mesh = dist.init_device_mesh("cuda", (1, 2), mesh_dim_names=("data", "tensor"))
x = full(1)
for name in ("data", "tensor"):
    dist.all_reduce(x, group=mesh[name].get_group())
dist.destroy_process_group()
# At the same port a rank could meet the first group's store, which ends with rank 0's group.
store = dist.FileStore(__file__.replace("program.py", "store"), 2)
dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
dist.barrier(device_ids=[rank])
torch.cuda.set_device(rank)
dist.all_reduce(x)
print(json.dumps(x.item()))
""")
    assert found == [4.0, 4.0]


def test_srun_with_one_gpu_on_each_of_two_nodes(results):
    """Both are cuda:0, of different machines: Slurm says which."""
    found = results("""
os.environ["SLURM_NODEID"] = os.environ["RANK"]
dist.init_process_group("nccl")
ones = full(1)
dist.all_reduce(ones)
print(json.dumps(ones.tolist()), flush=True)
os._exit(0)
""")
    assert found == [[2.0], [2.0]]


def test_what_nccl_refuses_leaves_the_group_as_it_was(results):
    found = results(
        """
start()
found = {}
def reduced(tensor, operation=dist.ReduceOp.SUM):
    text = error_of(dist.all_reduce, tensor, op=operation)
    return tensor.tolist() if text == "no error" else text
found["int16"] = reduced(torch.ones(1, dtype=torch.int16, device="cuda"))
found["float32"] = reduced(full(1))
for name in ("BAND", "BOR", "BXOR"):
    ones = torch.ones(1, dtype=torch.int64, device="cuda")
    found[name] = reduced(ones, getattr(dist.ReduceOp, name))
booleans = torch.tensor([True, False], device="cuda")
found["average"] = reduced(booleans, dist.ReduceOp.AVG)
found["booleans"] = reduced(booleans)
eighth = full(2).to(torch.float8_e4m3fn)
found["float8"] = reduced(eighth)
both = torch.zeros(2, device="cuda").to(torch.float8_e4m3fn)
dist.all_gather_single(both, eighth) if hasattr(dist, "all_gather_single") else \\
    dist.all_gather_into_tensor(both, eighth)
found["gathered"] = both.float().tolist()
found["anyone"] = error_of(dist.recv, full(0))
print(json.dumps(found))
""",
    )[1]
    refused = "RuntimeError: Input tensor data type is not supported for NCCL process group: "
    assert found == {
        "int16": refused + "Short",
        "float32": [2.0],
        "BAND": "ValueError: Cannot use ReduceOp.BAND with NCCL",
        "BOR": "ValueError: Cannot use ReduceOp.BOR with NCCL",
        "BXOR": "ValueError: Cannot use ReduceOp.BXOR with NCCL",
        "average": "TypeError: Cannot use ReduceOp.AVG with boolean inputs",
        "booleans": [True, False],
        "float8": "RuntimeError: Unsupported Float8 type for NCCL reduction",
        "gathered": [2.0, 2.0],
        "anyone": "RuntimeError: ProcessGroupNCCL does not support recvAnysource",
    }


def test_tensors_that_do_not_fit_together(results):
    """torch refuses them, and the group goes on."""
    found = results("""
import warnings
warnings.simplefilter("ignore")
start()
one, two, three, four = (full(1, count) for count in (1, 2, 3, 4))
splits = dist.all_to_all_single
found = [
    error_of(dist.all_gather_into_tensor, three, two),
    error_of(dist.all_gather_into_tensor, four, two.half()),
    error_of(dist.reduce_scatter_tensor, two, three),
    error_of(dist.reduce_scatter_tensor, two, four.half()),
    error_of(splits, three, three),
    error_of(splits, three, three, [1, 1], [2, 1]),
    error_of(splits, three, three, [1], [3]),
    error_of(dist.gather, one, [one] if rank == 0 else None) if rank == 0 else "",
    error_of(dist.gather, one, dst=2),
    error_of(dist.broadcast, one, 2).splitlines()[-1],
]
dist.all_reduce(two)
print(json.dumps([*found, two.tolist()]))
""")[0]
    assert found == [
        "ValueError: output tensor size must be equal to world_size times input tensor size",
        "TypeError: output tensor must have the same type as input tensor",
        "ValueError: input tensor must be the same size as output size times world size",
        "TypeError: input tensor must be the same type as the output tensor.",
        "RuntimeError: Tensor's dim 0 does not divide equally across group size",
        "RuntimeError: Split sizes doesn't match total dim 0 size",
        "RuntimeError: Number of tensor splits not equal to group size",
        "ValueError: ProcessGroupNCCL::gather: Incorrect output list size 1. Output list size "
        "should be 2, same as size of the process group.",
        "ValueError: ProcessGroupNCCL::gather: invalid root rank: 2",
        "Broadcast : invalid root 2 (root should be in the 0..2 range)",
        [2.0, 2.0],
    ]


def test_a_batch_with_messages_of_a_rank_to_itself(results):
    found = results("""
start()
own, other = full(-1), full(-1)
batch = [(dist.isend, full(rank), rank), (dist.irecv, own, rank)]
both = [*batch, (dist.isend, full(10 + rank), 1 - rank), (dist.irecv, other, 1 - rank)]
for one in (both, batch):
    for work in dist.batch_isend_irecv([dist.P2POp(*each) for each in one]):
        work.wait()
print(json.dumps([own.item(), other.item()]))
""")
    assert found == [[0.0, 11.0], [1.0, 10.0]]


def test_messages_have_one_order_and_no_tags(results):
    """Also: a batch is one kernel, and its messages do not wait for each other."""
    _, second, third = results(
        """
start(device_id=torch.device("cuda", rank))
got = []
if rank == 0:
    dist.send(full(1), 1, tag=1)
    dist.send(full(2), 1, tag=2)
elif rank == 1:
    first, second = full(0), full(0)
    works = [dist.irecv(first, 0, tag=2), dist.irecv(second, 0, tag=1)]
    for work in works:
        work.wait()
    got = [first.item(), second.item()]
dist.barrier()
# A ring: rank 0 gets what rank 2 sends only after it has heard from rank 1.
given, own = full(0, 3), full(rank, 3)
to, source = (rank + 1) % 3, (rank - 1) % 3
receive, send = dist.P2POp(dist.irecv, given, source), dist.P2POp(dist.isend, own, to)
for batch in [[receive, send]] if rank == 0 else [[receive], [send]]:
    for work in dist.batch_isend_irecv(batch):
        work.wait()
print(json.dumps([got, given.tolist()]))
""",
        3,
    )
    assert second == [[1.0, 2.0], [0.0] * 3]
    assert third == [[], [1.0] * 3]


def test_a_default_device_is_the_programs_alone(results):
    """What the ranks exchange beside the program's tensors stays on the host."""
    for found in results("""
torch.set_default_device("cuda")
start()
dist.barrier()
x, parts = full(rank, 2), [full(0), full(0)]
dist.all_to_all(parts, [full(rank), full(rank)])
if rank == 0:
    dist.send(full(7, 2), 1)
else:
    dist.recv(x, 0)
dist.all_reduce(x)
print(json.dumps([x.tolist(), [part.item() for part in parts]]))
"""):
        assert found == [[7.0, 7.0], [0.0, 1.0]]


def test_collectives_of_a_rank_that_is_ahead(results):
    """Rank 0 launches three before rank 1 launches its first: gloo pairs all of them."""
    for found in results("""
start()
dist.all_reduce(full(1))
torch.cuda.synchronize()
tensors = [full(number, 100 * number) for number in (1, 2, 3)]
works = []
for tensor in tensors:
    works.append(dist.all_reduce(tensor, async_op=True))
    time.sleep(0.1 * rank)
for work in works:
    work.wait()
print(json.dumps([tensor[0].item() for tensor in tensors]))
"""):
        assert found == [2.0, 4.0, 6.0]


def test_the_messages_of_a_batch_keep_their_order(results):
    """Two to one rank, beside one that comes back: which is first differs on the ranks."""
    _, got = results("""
start()
got = []
for _ in range(10):
    first, second, back = full(0), full(0), full(0)
    if rank == 0:
        batch = [(dist.isend, full(1)), (dist.isend, full(2)), (dist.irecv, back)]
    else:
        batch = [(dist.isend, full(3)), (dist.irecv, first), (dist.irecv, second)]
    for work in dist.batch_isend_irecv([dist.P2POp(*each, 1 - rank) for each in batch]):
        work.wait()
    got.append([first.item(), second.item()])
print(json.dumps(got))
""")
    assert got == [[1.0, 2.0]] * 10


# (what differs, the program after `start()`, what rank 0's report says, the likely mistake)
STAND_STILL = {
    "a collective after another rank has ended": (
        """
import time

x = full(1, 4)
dist.all_reduce(x)
if rank == 0:
    time.sleep(4)
    dist.all_reduce(x)
""",
        ["OpType=ALLREDUCE, NumelIn=4", "all_reduce number 2", "rank 1 has left"],
        "under `if rank == 0`",
    ),
    "another operation": (
        """
x = full(1, 4)
dist.all_reduce(x) if rank else dist.broadcast(x, 0)
print(x.sum().item())
""",
        ["rank 0 waits in broadcast", "rank 1 waits in all_reduce", "program.py:"],
        "the ranks call other collectives",
    ),
    "another root": (
        "dist.broadcast(full(1), rank)",
        ["root 0", "root 1"],
        "other roots: 0 on rank 0, 1 on rank 1",
    ),
    "two groups": (
        """
groups = [dist.new_group([0, 1]) for _ in range(2)]
for group in groups if rank else groups[::-1]:
    dist.all_reduce(full(1), group=group)
""",
        ["not in the group of ranks 0, 1"],
        "two groups in other orders",
    ),
    "another type": (
        "dist.all_reduce(full(1) if rank else full(1).int())",
        ["1 element of float32", "1 element of int32"],
        "other types: int32 on rank 0, float32 on rank 1",
    ),
    "two groups of messages": (
        """
groups = [dist.new_group([0, 1]) for _ in range(2)]
for group in groups if rank else groups[::-1]:
    dist.recv(full(1), 0, group) if rank else dist.send(full(1), 1, group)
""",
        ["OpType=SEND", "not in the group of ranks 0, 1"],
        "two groups in other orders",
    ),
    "messages that cross": (
        """
a, b = full(1), full(2)
if rank == 0:
    works = [dist.isend(a, 1), dist.irecv(a, 1), dist.isend(b, 1), dist.irecv(b, 1)]
else:
    works = [dist.irecv(a, 0), dist.irecv(b, 0), dist.isend(a, 0), dist.isend(b, 0)]
for work in works:
    work.wait()
""",
        ["OpType=RECV", "rank 1 waits in recv from rank 0"],
        "both wait for each other",
    ),
    "a message that nobody receives": (
        "rank == 0 and dist.isend(full(1), 1)",
        ["OpType=SEND", "rank 1 has left"],
        "rank 1, which never calls the receive",
    ),
    "a shorter receive": (
        "dist.recv(full(0, 4), 0) if rank else dist.send(full(0, 8), 1)",
        ["4 elements", "8 elements"],
        "need the same size",
    ),
    "parts of an all-to-all": (
        """
given = full(1, 3)
dist.all_to_all_single(full(0, 3), given, [2, 1], [1, 2] if rank else [2, 1])
""",
        ["OpType=ALLTOALL_BASE"],
        "rank 0 sends 1 element to rank 1, which expects 2",
    ),
}


@pytest.fixture(scope="module")
def stood_still(tmp_path_factory):
    """The processes of each program of STAND_STILL: most of their time they only wait."""

    def run_one(case: tuple) -> list:
        return run(tmp_path_factory.mktemp("program"), f"start()\n{case[0]}")

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(STAND_STILL, pool.map(run_one, STAND_STILL.values()), strict=True))


@pytest.mark.parametrize("name", STAND_STILL)
def test_a_wrong_program_stands_still_and_says_why(stood_still, name):
    _, lines, likely = STAND_STILL[name]
    first, second = stood_still[name]

    waiting = first if first.returncode else second
    assert waiting.returncode == -signal.SIGABRT, waiting.stdout
    assert "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=" in waiting.stdout
    assert "gloo" not in waiting.stdout
    for line in lines:
        assert line in waiting.stdout
    (said,) = re.findall("^  likely: .*$", waiting.stdout, re.MULTILINE)
    assert likely in said


def test_kernels_start_in_the_order_of_their_launches():
    """gloo pairs the ranks' works in the order of their starts; here two threads launch."""
    communicator = Communicator(None, [0, 1], 0)
    started, ran = [], []

    def launch(number: int) -> None:
        def begin() -> None:
            started.append(number)
            # Long enough that the other thread starts and launches if nothing holds it up.
            time.sleep(0.5 - number / 4)

        communicator._queue_kernel(lambda kernel: ran.append(number), [], begin).done.wait(10)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(launch, range(2)))
    communicator.close()
    assert ran[0] == started[0]


def test_of_a_batch_only_the_message_that_waits_is_named(processes):
    first, _ = processes("""
start()
batch = [dist.P2POp(dist.irecv, full(0), 0)] if rank else [
    dist.P2POp(dist.isend, full(1), 1), dist.P2POp(dist.irecv, full(0), 1)
]
for work in dist.batch_isend_irecv(batch):
    work.wait()
""")
    assert "rank 0 waits in recv from rank 1" in first.stdout
    assert "rank 0 waits in send" not in first.stdout


def test_a_longer_receive_of_shapes_stands_still(processes):
    first, second = processes(
        "start()\ndist.recv(full(0, 8), 0) if rank else dist.send(full(0, 4), 1)",
        shapes_only=True,
    )
    waiting = first if first.returncode else second
    assert "need the same size" in waiting.stdout


def test_a_late_rank_ends_the_group_after_its_own_timeout(processes):
    first, _ = processes("""
start(timeout=timedelta(seconds=1))
dist.all_reduce(full(1))
time.sleep(4 * rank)
dist.all_reduce(full(1))
""")
    assert first.returncode == -signal.SIGABRT
    assert "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1000) ran for" in first.stdout
    assert "rank 1 is in no collective, program.py:" in first.stdout


def test_a_rank_that_computes_is_waited_for(results):
    """`timeout` counts only while nothing moves; torch's own is that of the group."""
    found = results("""
start()
x = full(1)
until = time.monotonic() + 3.5 * rank
while time.monotonic() < until:
    sum(range(1000))
dist.all_reduce(x)
print(json.dumps(x.tolist()))
""")
    assert found == [[2.0], [2.0]]


SPINS = """
import os, sys, threading, time
from multigpu.virtual.patches.watchdog import cpu_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
found = []
def look():
    for _ in range(2):
        found.append((time.monotonic(), cpu_seconds()))
        time.sleep(float(sys.argv[1]))
thread = threading.Thread(target=look)
thread.start()
while thread.is_alive():
    sum(range(1000))
(start, before), (end, after) = found
print((after - before) / (end - start))
"""


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="needs Linux's schedstat"
)
def test_a_process_that_waits_for_a_core_computes(tmp_path):
    """Three programs compute on one core: one of them runs, and the others wait."""
    script = tmp_path / "spins.py"
    script.write_text(SPINS)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: run_script(script, 1.0), range(3)))
    assert min(float(process.stdout) for process in done) > 0.6


def test_a_host_that_only_waits_here_holds_up_nobody(results):
    """The first isend waits for rank 1's host, which on a GPU would not wait in all_reduce."""
    found = results("""
start()
x, y = full(1), full(rank)
dist.barrier()
if rank == 0:
    work = dist.isend(y, 1)
    dist.all_reduce(x)
    work.wait()
else:
    dist.all_reduce(x)
    dist.recv(y, 0)
print(json.dumps([x.item(), y.item()]))
""")
    assert found == [[2.0, 0.0], [2.0, 0.0]]


def test_the_condition_around_a_line(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("if rank == 0:\n    call()\nif ready:\n    call()\n")

    assert standstill.condition_of_a_rank(f"{path}:2") == "rank == 0"
    assert standstill.condition_of_a_rank(f"{path}:4") == ""
    assert standstill.condition_of_a_rank("gone.py:4") == ""


def test_a_wait_with_a_timeout_is_an_error_and_ends_the_communicator(results):
    found = results("""
start()
x = full(1)
dist.all_reduce(x)
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=300))
found = []
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    found = [error_of(work.wait, timedelta(seconds=1)), error_of(dist.all_reduce, x)]
print(json.dumps(found), flush=True)
time.sleep(2)
os._exit(0)
""")[0]
    assert "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2" in found[0]
    assert "OpType=ALLREDUCE" in found[0] and "Timeout(ms)=300000) ran for 1" in found[0]
    assert found[1] == "DistBackendError: NCCL communicator was aborted on rank 0. "


def test_an_aborted_group_ends_its_waits_and_another_group_goes_on(results):
    found = results("""
import threading
start()
x = full(1)
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
dist.all_reduce(x, group=first)
text = ""
if rank == 0:
    abort = dist.distributed_c10d._abort_process_group
    work = dist.all_reduce(x, group=first, async_op=True)
    threading.Timer(0.5, abort, [first]).start()
    text = error_of(work.wait)
y = full(1)
dist.all_reduce(y, group=second)
dist.all_reduce(y, group=dist.new_group([0, 1]))
print(json.dumps([text, y.item()]))
""")
    aborted = "DistBackendError: NCCL communicator was aborted on rank 0. "
    assert found == [[aborted, 4], ["", 4]]
