"""torch's flight recorder has the collectives of virtual GPUs, and torchfrtrace reads it."""

import pickle
import signal
from importlib.util import find_spec
from pathlib import Path

from commands import run_script

RECORD = """
folder = os.path.dirname(os.path.abspath(__file__))
os.environ.update(TORCH_FR_BUFFER_SIZE="8", TORCH_FR_DUMP_TEMP_FILE=folder + "/trace_")
del os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"]  # on by default
"""


def test_torchfrtrace_names_the_missing_rank(processes, tmp_path):
    """A rank that has not called the collective also writes its dump.

    Lesson 18 tests ranks whose calls differ.
    """
    first, _ = processes(f"""{RECORD}
start()
x = full(1, 4)
dist.all_reduce(x)
dist.group.WORLD.timeout = timedelta(seconds=1)
if rank == 0:
    dist.all_reduce(x)
until = time.monotonic() + 20
while not os.path.exists(folder + "/trace_1") and time.monotonic() < until:
    time.sleep(0.1)
""")

    assert first.returncode == -signal.SIGABRT, first.stdout
    assert f"rank 0 has written its flight recorder to {tmp_path / 'trace_0'}" in first.stdout
    last = pickle.loads((tmp_path / "trace_0").read_bytes())["entries"][-1]
    assert last["state"] == "scheduled" and last["collective_seq_id"] == 2
    torch = Path(find_spec("torch").origin).parent
    script = torch / "distributed" / "flight_recorder" / "fr_trace.py"
    analysed = run_script(script, "--prefix", "trace_", tmp_path, cwd=tmp_path)
    assert analysed.returncode == 0, analysed.stdout
    for text in ("collective: nccl:all_reduce", "missing ranks: {1}"):
        assert text in analysed.stdout


def test_the_entries_are_torchs(results, tmp_path):
    """The oldest of nine entries has left the buffer of eight."""
    found = results(
        RECORD
        + """
import pickle
start(device_id=torch.device("cuda", rank))
pair = dist.new_group([0, 1], group_desc="pair")
x, both = full(1, 3), full(0, 6)
c10d = torch._C._distributed_c10d
def reduce():
    dist.all_reduce(x)
dist.barrier()
reduce()
dist.all_gather([full(0, 3), full(0, 3)], x, group=pair)
dist.gather(x, [full(0, 3), full(0, 3)] if rank == 0 else None)
dist.send(x.half(), 1) if rank == 0 else dist.recv(full(0, 3).half(), 0)
operations = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, x.clone(), 1 - rank)]
for work in dist.batch_isend_irecv(operations):
    work.wait()
dist.all_gather_into_tensor(both, x)
torch.cuda.synchronize()
pickled = pickle.loads(c10d._dump_nccl_trace())
active = pickle.loads(c10d._dump_nccl_trace(onlyActive=True, includeStackTraces=False))
try:
    c10d._dump_nccl_trace_json()
except Exception as error:
    refused = str(error)
print(json.dumps([pickled, active["entries"], refused]))
""",
    )
    dumped, active, refused = found[0]
    assert "not as JSON" in refused
    entries = dumped["entries"]
    reduced = entries[0]
    frames = reduced.pop("frames")
    assert [frame["name"] for frame in frames[:4]] == [
        "all_reduce", "wrapper", "reduce", "<module>",
    ]  # fmt: skip
    assert frames[2]["filename"] == str(tmp_path / "program.py") and frames[2]["line"] > 30
    times = ("time_created_ns", "time_discovered_completed_ns")
    created, completed = (reduced.pop(key) for key in times)
    assert 1.7e18 < created <= completed
    assert int(reduced.pop("thread_id")) and reduced.pop("thread_name")
    assert reduced == {
        "record_id": 1,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 2,
        "p2p_seq_id": 0,
        "op_id": 2,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[3]],
        "input_dtypes": ["Float"],
        "output_sizes": [[3]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
    }
    fields = ("profiling_name", "input_sizes", "output_sizes", "op_id", "state", "is_p2p")
    batch = ("scheduled", True)
    assert [tuple(entry[field] for field in fields) for entry in entries[1:]] == [
        ("nccl:all_gather", [[3]], [[2, 3]], 1, "completed", False),
        ("nccl:gather", [[3]], [[3], [3]], 3, "completed", False),
        ("nccl:send 0->1", [[3]], [[3]], 4, "completed", True),
        ("nccl:send 0->1", [[3]], [[3]], 5, *batch),
        ("nccl:recv 0<-1", [[3]], [[3]], 6, *batch),
        ("nccl:coalesced", [], [], 6, "completed", False),
        ("nccl:_all_gather_base", [[3]], [[6]], 7, "completed", False),
    ]
    assert [entry["p2p_seq_id"] for entry in entries] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert entries[3]["input_dtypes"] == ["Half"]
    assert [entry["record_id"] for entry in active] == [5, 6]
    assert dumped["version"] == "2.10"
    pair = entries[1]["process_group"][0]
    assert dumped["pg_config"] == {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
        pair: {"name": pair, "desc": "pair", "ranks": "[0, 1]"},
    }
    status = {"enqueued": 4, "started": -1, "completed": 4}
    expected = {f"last_{key}_collective": value for key, value in status.items()}
    assert dumped["pg_status"]["0"] == expected


def test_a_recorder_that_is_off_has_no_entries(results):
    found = results("""
os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "0"
start()
dist.all_reduce(full(1))
import pickle
print(json.dumps(pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())))
""")
    assert not found[0]["entries"] and not found[0]["pg_config"]
