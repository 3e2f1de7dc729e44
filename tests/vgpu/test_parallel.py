"""DataParallel and DistributedDataParallel run unmodified on virtual GPUs, and equal the serial run."""

import copy
import json

import pytest
import torch
from beside import difference
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import comm

from conftest import run
from multigpu import vgpu
from multigpu.models import CNN


def batch(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    return torch.randn(n, 1, 8, 8, generator=source, dtype=torch.double), torch.randint(0, 10, (n,), generator=source)


def data_parallel(devices: list, steps: int = 3, on_host: bool = True) -> tuple[nn.Module, nn.Module]:
    """The CNN, trained serially on the CPU and with DataParallel on the devices."""
    torch.manual_seed(0)
    plain = CNN().double()
    there = copy.deepcopy(plain).to(devices[0])
    x, y = batch()
    for model, first in (
        (plain, torch.device("cpu")),
        (nn.DataParallel(there, [d.index for d in devices]), devices[0]),
    ):
        update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            out = model(x if on_host else x.to(first))
            assert out.device == first
            update.zero_grad()
            F.cross_entropy(out, y.to(first)).backward()
            update.step()
    return plain, there


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_data_parallel_equals_the_serial_run(count, on_host):
    with vgpu.running(count=count) as devices:
        assert difference(*data_parallel(devices, on_host=on_host)) <= 1e-15


def test_data_parallel_without_the_sum_of_gradients_differs(two, monkeypatch):
    """What the equality stands on: the gradients of the replicas are added up."""
    monkeypatch.setattr(comm, "reduce_add_coalesced", lambda inputs, destination=None: tuple(inputs[0]))
    assert difference(*data_parallel(two)) > 1e-3


def test_data_parallel_splits_and_loses_the_replicas_state(two):
    seen = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(1)), 0

        def forward(self, x):
            self.calls += 1
            seen.append((str(x.device), len(x), str(self.weight.device)))
            return x * self.weight

    model = Counting().to(two[0])
    out = nn.DataParallel(model)(torch.ones(5, 2))
    assert sorted(seen) == [("vgpu:0", 3, "vgpu:0"), ("vgpu:1", 2, "vgpu:1")]
    assert model.calls == 0 and out.shape == (5, 2) and out.device == two[0]


def test_data_parallel_is_deterministic_with_dropout_and_in_time():
    """The replicas run in threads: neither the random numbers nor the simulated times depend on which comes first."""
    results = set()
    for _ in range(3):
        with vgpu.running(count=2) as devices:
            torch.manual_seed(0)
            model = nn.DataParallel(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4)).to(devices[0]))
            loss = model(torch.ones(6, 8)).square().mean()
            loss.backward()
            events = tuple((e.device, e.kind, e.phase, e.name, e.start, e.end) for e in vgpu.timeline().events)
            results.add((loss.item(), vgpu.elapsed(), events))
    assert len(results) == 1


def test_an_error_in_a_replica_names_it(two):
    model = nn.DataParallel(nn.Linear(3, 2).to(two[0]))
    with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 0 on device 0"):
        model(torch.ones(4, 5))
    model.module.to(two[1])
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device vgpu:0"):
        model(torch.ones(4, 3))


def test_comm_functions(two):
    x = torch.arange(6.0, device=two[0])
    copies = comm.broadcast(x, [0, 1])
    assert [str(copy.device) for copy in copies] == ["vgpu:0", "vgpu:1"] and copies[1].tolist() == x.tolist()
    target = torch.zeros(6, device=two[1])
    assert comm.broadcast(x, out=[target])[0] is target and target.tolist() == x.tolist()
    with pytest.raises(RuntimeError, match="Exactly one of 'devices' and 'out'"):
        comm.broadcast(x)
    pieces = comm.scatter(x, [0, 1], chunk_sizes=[4, 2])
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2, 3], [4, 5]] and pieces[1].device == two[1]
    assert comm.gather(pieces, destination=1).tolist() == x.tolist()
    assert comm.gather(pieces, destination=-1).device.type == "cpu"
    sums = comm.reduce_add_coalesced([[x, x.half()], [copies[1], copies[1].half()]], 1)
    assert [total.dtype for total in sums] == [torch.float32, torch.float16] and sums[0].device == two[1]
    assert sums[0].tolist() == [0, 2, 4, 6, 8, 10] == sums[1].tolist()
    assert comm.broadcast_coalesced([x, x.half()], [0, 1])[1][1].dtype is torch.float16


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
    kinds = [event.name for event in vgpu.timeline().events if event.kind == "collective"]
    told["sends"] = kinds.count("send"), kinds.count("recv")
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
    assert ranks[0]["collectives"] == ranks[1]["collectives"] and len(ranks[0]["collectives"]) >= 10
    assert {device for device, _, _ in ranks[0]["collectives"]} == {0, 1}


def test_ddp_without_the_synchronisation_differs(tmp_path):
    assert all(rank["difference"] > 1e-3 for rank in two_processes("unsynchronised", tmp_path))


def test_ddp_with_device_ids(tmp_path):
    zero, one = two_processes("one_device", tmp_path)
    assert zero["weights"] == one["weights"]


def test_torchs_pipelines_equal_the_serial_run(tmp_path):
    for rank in two_processes("pipeline", tmp_path):
        assert rank["ScheduleGPipe"] <= 1e-7 and rank["Schedule1F1B"] <= 1e-7
        assert rank["sends"][0] >= 8 and rank["sends"][1] >= 8


def test_collectives_between_processes(tmp_path):
    for rank, told in enumerate(two_processes("collectives", tmp_path)):
        assert told["sum"] == [3.0] * 4
        assert told["gathered"] == [[3.0] * 4, [4.0] * 4] and told["gathered whole"] == [3.0] * 4 + [4.0] * 4
        assert told["scattered"] == [6.0] * 4 if rank == 0 else told["scattered"] == [8.0] * 4
        assert told["broadcast"] == [1.0, 1.0] and told["host"] == [3] and told["objects"] == [{"rank": 0}, {"rank": 1}]
        assert told.get("reduced", [2.0, 2.0]) == [2.0, 2.0] == told.get("received", [2.0, 2.0])
        assert told["error"] == "Tensors of one collective must be on one device, but found vgpu:0 and vgpu:1"


def test_a_collective_starts_when_the_last_rank_arrives(tmp_path):
    zero, one = two_processes("late", tmp_path)
    assert one["before"] > 1.3 * zero["before"]
    assert zero["start"] == one["start"] >= one["before"] and zero["end"] == one["end"]
    ring = 2 * (3.4e-6 + 4e6 / 2 / 150e9)  # two ranks: 2 (n−1) (alpha + bytes/n · beta)
    assert zero["end"] - zero["start"] == pytest.approx(ring + 2e-6)
    for rank in (zero, one):
        assert rank["sum"] == 3e6 and rank["read"][1] >= rank["read"][0]
    assert zero["after barrier"] == pytest.approx(one["after barrier"], abs=1e-9)
