"""DDP, pipelines and collectives run unmodified on virtual GPUs, and equal the serial run."""

import json
import textwrap

import pytest
import torch
from commands import run

from multigpu.vgpu import LINKS


def batch(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    return torch.randn(n, 1, 8, 8, generator=source, dtype=torch.double), torch.randint(
        0, 10, (n,), generator=source
    )


WORKER = """
import json, sys, torch
from datetime import timedelta
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from multigpu import vgpu

rank, port, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
first, second = vgpu.start(2)
store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("vgpu", store=store, rank=rank, world_size=2)


class Halves(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.body, self.head = nn.Linear(10, 20).to(first), nn.Linear(20, 5).to(second)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.to(self.first))).to(self.second))

def train(model, part, steps=5):
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 10, generator=source)[part], torch.randn(8, 5, generator=source)[part]
        out = model(x)
        update.zero_grad()
        (out - y.to(out.device)).square().mean().backward()
        update.step()

told = {}
if what in ("ddp", "bucket_view", "unsynchronised"):
    torch.manual_seed(rank)  # different weights: DDP sends rank 0's to all
    model = Halves(first, second)
    serial = Halves("cpu", "cpu")
    ddp = DDP(model, gradient_as_bucket_view=what == "bucket_view")
    serial.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
    if what == "unsynchronised":
        with ddp.no_sync():
            train(ddp, slice(rank, None, 2))
    else:
        train(ddp, slice(rank, None, 2))
    train(serial, slice(None))
    told["difference"] = max((p.cpu() - q).abs().max().item() for p, q in zip(model.parameters(), serial.parameters()))
    timeline = vgpu.timeline()
    told["collectives"] = [(e.device, e.start, e.end) for e in timeline.events if e.kind == "collective"]
    told["elapsed"] = vgpu.elapsed()
elif what == "pipeline":
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    device = (first, second)[rank]
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(10, 20), nn.Tanh()), nn.Linear(20, 5)]
    serial = nn.Sequential(*parts)
    x, y = torch.randn(8, 10), torch.randn(8, 5)
    nn.functional.mse_loss(serial(x), y).backward()
    expected = [parameter.grad.clone() for parameter in parts[rank].parameters()]
    for schedule in (ScheduleGPipe, Schedule1F1B):
        stage = parts[rank].to(device)
        stage.zero_grad()
        run = schedule(PipelineStage(stage, rank, 2, device), 4, loss_fn=nn.MSELoss())
        run.step(x.to(device)) if rank == 0 else run.step(target=y.to(device))
        grads = [parameter.grad.cpu() for parameter in stage.parameters()]
        told[schedule.__name__] = max((g - e).abs().max().item() for g, e in zip(grads, expected))
    sent = [event for event in vgpu.timeline().events if event.name in ("send", "recv")]
    told["sends"] = [sum(event.name == name for event in sent) for name in ("send", "recv")]
    told["spans"] = sorted((event.start, event.end) for event in sent if event.kind == "transfer")
elif what == "messages":
    s = torch.ones(1, device=first)
    if rank == 0:
        x = torch.ones(10**6, device=first)
        work = dist.isend(x, 1)
        x.zero_()  # nobody waits for the message: not this, and not the all-reduce
        dist.all_reduce(s)
        work.wait()
    else:
        dist.all_reduce(s)
        for _ in range(10):
            torch.ones(1000, 1000, device=first) @ torch.ones(1000, 1000, device=first)
        x = torch.zeros(10**6, device=first)
        told["called"] = vgpu.elapsed()
        dist.recv(x, 0)
        told["got"] = x.sum().item()
    told["spans"] = [(event.start, event.end) for event in vgpu.timeline().events if event.name in ("send", "recv")]
elif what == "memory":
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = DDP(nn.Linear(100, 100).to(first))
    part = nn.Linear(100, 100).to(second)
    run = Schedule1F1B(PipelineStage(part, rank, 2, second), 4, loss_fn=nn.MSELoss())
    x = torch.ones(8, 100)
    told["held"] = []
    for _ in range(5):
        model(x.to(first)).sum().backward()
        run.step(x.to(second)) if rank == 0 else run.step(target=x.to(second))
        last = dist.all_reduce(summed := torch.ones(100, device=first), async_op=True)
        told["held"].append([torch.vgpu.memory_allocated(place) for place in (first, second)])
    told["result"] = (last.result()[0] - summed).abs().sum().item()
elif what == "one_device":
    torch.manual_seed(0)
    model = nn.Linear(10, 5).to(first)
    ddp = DDP(model, device_ids=[0])
    train(ddp, slice(rank, None, 2), 1)
    told["weights"] = model.weight.detach().cpu().flatten().tolist()
elif what == "collectives":
    t = torch.full((4,), rank + 1.0, device=second)
    dist.all_reduce(t)
    told["sum"] = t.tolist()
    parts = [torch.empty(4, device=second) for _ in range(2)]
    dist.all_gather(parts, t + rank)
    told["gathered"] = [part.tolist() for part in parts]
    out, piece = torch.empty(8, device=second), torch.empty(4, device=second)
    dist.all_gather_single(out, t + rank) if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor(out, t + rank)
    told["gathered whole"] = out.tolist()
    dist.reduce_scatter_single(piece, out) if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor(piece, out)
    told["scattered"] = piece.tolist()
    b = torch.full((2,), float(rank), device=first)
    dist.broadcast(b, 1)
    told["broadcast"] = b.tolist()
    dist.reduce(b, 0)
    if rank == 0:
        told["reduced"] = b.tolist()
        dist.send(b, 1)
    else:
        dist.recv(b, 0)
        told["received"] = b.tolist()
    host = torch.tensor([rank + 1])
    dist.all_reduce(host)
    told["host"] = host.tolist()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    told["objects"] = objects
    try:
        dist.all_gather([torch.empty(4, device=first), torch.empty(4, device=second)], t)
    except RuntimeError as error:
        told["error"] = str(error)
elif what == "late":
    if rank == 1:
        for _ in range(10):
            torch.ones(1000, 1000, device=first) @ torch.ones(1000, 1000, device=first)
    vgpu.elapsed()
    before = vgpu.elapsed()
    work = dist.all_reduce(torch.ones(10**6, device=first), async_op=True)
    other = torch.ones(1000, 1000, device=first) @ torch.ones(1000, 1000, device=first)
    work.wait()
    event = next(e for e in vgpu.timeline().events if e.kind == "collective")
    told = {"before": before, "start": event.start, "end": event.end}
    # Whoever reads without waiting still gets the sum, and not before it is there.
    again = torch.full((10**6,), rank + 1.0, device=second)
    dist.all_reduce(again, async_op=True)
    told["sum"] = (again * 1).sum().item()
    events = [e for e in vgpu.timeline().events if e.device == 1]
    told["read"] = [next(e.end for e in events if e.kind == "collective"), next(e.start for e in events if e.name == "mul")]
    dist.barrier()
    told["after barrier"] = vgpu.elapsed()
dist.barrier()
print(json.dumps(told))
dist.destroy_process_group()
"""


def two_processes(what: str, tmp_path) -> list[dict]:
    """Run WORKER as rank 0 and rank 1, each with two virtual GPUs, and give what the ranks tell."""
    import socket
    from concurrent.futures import ThreadPoolExecutor

    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda rank: run("python", script, rank, port, what), range(2)))
    for process in done:
        assert process.returncode == 0, process.stdout
    return [json.loads(process.stdout.splitlines()[-1]) for process in done]


@pytest.mark.parametrize("what", ["ddp", "bucket_view"])
def test_ddp_over_two_devices_in_two_processes_equals_the_serial_run(tmp_path, what):
    ranks = two_processes(what, tmp_path)
    assert all(rank["difference"] <= 1e-6 for rank in ranks)
    # both ranks see the same collectives, at the same simulated times
    assert (
        ranks[0]["collectives"] == ranks[1]["collectives"]
        and len(ranks[0]["collectives"]) >= 10
    )
    assert {device for device, _, _ in ranks[0]["collectives"]} == {0, 1}


def test_a_message_takes_the_same_time_on_both_sides(tmp_path):
    """It starts when both are there, as with NCCL; what was sent is what stood there when it was sent."""
    sender, receiver = two_processes("messages", tmp_path)
    start, end = sender["spans"][0]
    assert (
        sender["spans"] == receiver["spans"]
        and len(sender["spans"]) == 1
        and receiver["got"] == 1e6
    )
    assert start >= receiver["called"] > 0
    assert end - start == pytest.approx(
        LINKS["NVLink2"].latency + 4e6 / LINKS["NVLink2"].bandwidth
    )


def test_what_was_sent_is_given_back(tmp_path):
    """The group remembers its last works, and not their tensors: memory does not grow from step to step."""
    for rank in two_processes("memory", tmp_path):
        assert rank["held"][1] == rank["held"][4] and rank["result"] == 0


@pytest.mark.parametrize("destroy", [True, False])
def test_no_thread_of_gloo_is_left_when_python_ends(destroy):
    """One that frees a tensor then aborts the process, once in some hundred runs."""
    source = f"""
        import atexit, glob, torch, torch.distributed as dist
        from multigpu import vgpu
        from torch.nn.parallel import DistributedDataParallel as DDP

        threads = lambda: [open(name).read().strip() for name in glob.glob("/proc/self/task/*/comm")]
        atexit.register(lambda: print("at the end", sum("gloo" in name for name in threads())))
        first, second = vgpu.start(2)
        dist.init_process_group("vgpu", store=dist.HashStore(), rank=0, world_size=1)
        model = DDP(torch.nn.Linear(2, 2).to(first))
        model(torch.ones(1, 2, device=first)).sum().backward()
        print("before", sum("gloo" in name for name in threads()))
        if {destroy}:
            dist.destroy_process_group()
    """
    said = run("python", "-c", textwrap.dedent(source)).stdout
    assert "before 0" not in said and "before" in said and "at the end 0" in said, said


def test_ddp_without_the_synchronisation_differs(tmp_path):
    assert all(rank["difference"] > 1e-3 for rank in two_processes("unsynchronised", tmp_path))


def test_ddp_with_device_ids(tmp_path):
    zero, one = two_processes("one_device", tmp_path)
    assert zero["weights"] == one["weights"]


def test_torchs_pipelines_equal_the_serial_run(tmp_path):
    ranks = two_processes("pipeline", tmp_path)
    for rank in ranks:
        assert rank["ScheduleGPipe"] <= 1e-7 and rank["Schedule1F1B"] <= 1e-7
        assert (
            rank["sends"][0] >= 8
            and rank["sends"][1] >= 8
            and rank["spans"] == ranks[0]["spans"]
        )


def test_collectives_between_processes(tmp_path):
    for rank, told in enumerate(two_processes("collectives", tmp_path)):
        assert told["sum"] == [3.0] * 4
        assert (
            told["gathered"] == [[3.0] * 4, [4.0] * 4]
            and told["gathered whole"] == [3.0] * 4 + [4.0] * 4
        )
        assert told["scattered"] == [6.0] * 4 if rank == 0 else told["scattered"] == [8.0] * 4
        assert (
            told["broadcast"] == [1.0, 1.0]
            and told["host"] == [3]
            and told["objects"] == [{"rank": 0}, {"rank": 1}]
        )
        assert (
            told.get("reduced", [2.0, 2.0]) == [2.0, 2.0] == told.get("received", [2.0, 2.0])
        )
        assert (
            told["error"]
            == "Tensors of one collective must be on one device, but found vgpu:0 and vgpu:1"
        )


def test_a_collective_starts_when_the_last_rank_arrives(tmp_path):
    zero, one = two_processes("late", tmp_path)
    assert one["before"] > 1.3 * zero["before"]
    assert zero["start"] == one["start"] >= one["before"] and zero["end"] == one["end"]
    ring = 2 * (3.4e-6 + 4e6 / 2 / 150e9)  # two ranks: 2 (n−1) (alpha + bytes/n · beta)
    assert zero["end"] - zero["start"] == pytest.approx(ring + 2e-6)
    for rank in (zero, one):
        assert rank["sum"] == 3e6 and rank["read"][1] >= rank["read"][0]
    assert zero["after barrier"] == pytest.approx(one["after barrier"], abs=1e-9)
