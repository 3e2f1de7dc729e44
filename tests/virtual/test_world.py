"""`multigpu virtual --world`: one process is one rank of a large world.

A world whose ranks all run, under torchrun, has the same simulated times.
"""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from virtual_runs import TORCHRUN, reported, virtual, write

from multigpu import GPUS, LINKS, NETWORKS
from multigpu.virtual import command, control
from multigpu.virtual.sim.network import Network, collective_seconds, transfer_seconds
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

BEGIN = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
device = torch.device("cuda", local)
"""
DDP = (
    BEGIN
    + """
layers = [nn.Linear(1024, 1024, bias=False) for _ in range(3)]
model = nn.Sequential(*layers).to(device)
model = nn.parallel.DistributedDataParallel(model, device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    loss = model(torch.ones(4096, 1024, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
"""
)
FSDP = (
    BEGIN
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

shape = tuple(map(int, sys.argv[1:]))
mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).to(device)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.ones(4096, 1024, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
PIPELINE = (
    BEGIN
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

stages = int(sys.argv[1])
mesh = init_device_mesh(
    "cuda", (stages, dist.get_world_size() // stages), mesh_dim_names=("stages", "copies")
)
index = mesh.get_local_rank("stages")
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()).to(device)
model = nn.parallel.DistributedDataParallel(
    model, device_ids=[local], process_group=mesh.get_group("copies")
)
stage = PipelineStage(model, index, stages, device, group=mesh.get_group("stages"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.ones(4096, 1024, device=device)
for step in range(3):
    first, last = index == 0, index == stages - 1
    schedule.step(*([rows] if first else []), **({"target": rows} if last else {}))
    optimizer.step()
    optimizer.zero_grad()
"""
)
# torch 2.13 has new names for two collectives.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
NODES = ("--gpus-per-node", 8, "--between-nodes", "HDR200")


def test_numbers_are_as_if_every_rank_had_this_ranks():
    with control.running(count=1) as [device]:
        dist.init_process_group("vgpu_world", rank=2, world_size=6, store=dist.HashStore())
        x = torch.arange(6.0, device=device)
        dist.all_reduce(x)
        assert x.tolist() == [0, 6, 12, 18, 24, 30]
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert x.tolist() == [0, 6, 12, 18, 24, 30]
        whole, part = torch.empty(36, device=device), torch.empty(1, device=device)
        all_gather_single(whole, x)
        assert whole.view(6, 6).tolist() == [x.tolist()] * 6
        reduce_scatter_single(part, x)
        assert part.tolist() == [72]
        received = torch.empty(6, device=device)
        dist.all_to_all_single(received, x)
        assert received.tolist() == [12] * 6
        objects = [None] * 6
        dist.all_gather_object(objects, {"rank": dist.get_rank()})
        assert objects == [{"rank": 2}] * 6
        dist.barrier()
        assert control.elapsed() > 0
        dist.destroy_process_group()


def test_ddp_on_1024_gpus(tmp_path):
    script = write(tmp_path, DDP)
    world = ("--world", 1024, "--as-rank", 77, *NODES, "--gpu", "A100-80GB")
    text, numbers = reported(
        tmp_path, *world, "--shapes-only", "--samples-per-step", 4096 * 1024, script
    )
    assert "step 3: loss unknown" in text
    assert "simulated: rank 77 of 1,024 × A100-80GB, 8 per node: NVLink2 inside" in text
    network = Network(LINKS["NVLink2"], NETWORKS["HDR200"], 8)
    # DDP's first bucket is small: here one layer, and two in the other one.
    everyone, layer = network.group(1024), 1024 * 1024 * 4
    buckets = sum(
        collective_seconds("allreduce", nbytes, everyone) + KERNEL_OVERHEAD
        for nbytes in (layer, 2 * layer)
    )
    loss = transfer_seconds(4, LINKS[GPUS["A100-80GB"].host])
    step, at_peaks = numbers["step"], numbers["step_at_peaks"]
    for figures in (step, at_peaks):
        assert figures["communicate_seconds"] == pytest.approx(buckets + loss)
        assert 0 < figures["exposed_seconds"] <= figures["communicate_seconds"]
        assert figures["steps"] == 3
        rate = 4096 * 1024 / figures["step_seconds"]
        assert figures["samples_per_second"] == pytest.approx(rate)
    assert at_peaks["step_seconds"] < step["step_seconds"]
    # Forward and backward are three times the products of forward.
    flops = 3 * 2 * 3 * 4096 * 1024 * 1024
    assert step["mfu_of_flops_per_second"] == GPUS["A100-80GB"].fp32
    share = flops / step["step_seconds"] / GPUS["A100-80GB"].fp32
    assert step["mfu"] == pytest.approx(share)
    assert numbers["gpus"][0]["device"] == "cuda:5"


@pytest.mark.parametrize(
    ("program", "ranks", "arguments", "as_rank"),
    [
        (DDP, 4, (), "3"),
        (FSDP, 4, (2, 2), "1"),
        (PIPELINE, 4, (2,), "1,3"),
    ],
)
@pytest.mark.slow
def test_the_time_of_a_step_is_that_of_a_world_that_runs(
    tmp_path, program, ranks, arguments, as_rank
):
    """Two nodes with two GPUs each: all four ranks run, or one rank (of a pipeline: two)."""
    script = write(tmp_path, program)
    nodes = ("--gpus-per-node", 2, "--between-nodes", "Ethernet25", "--shapes-only")
    launcher = (*TORCHRUN, f"--nproc-per-node={ranks}")
    measure = ("--samples-per-step", 1)
    _, all_run = reported(
        tmp_path, "--gpus", ranks, *nodes, *measure, *launcher, script, *arguments
    )
    _, one_runs = reported(
        tmp_path, "--world", ranks, "--as-rank", as_rank, *nodes, script, *arguments
    )
    for name in ("step_seconds", "compute_seconds", "communicate_seconds", "exposed_seconds"):
        assert one_runs["step"][name] == pytest.approx(all_run["step"][name], rel=1e-6), name
    peaks = {gpu["rank"]: gpu["peak_bytes"] for gpu in all_run["gpus"]}
    for gpu in one_runs["gpus"]:
        assert gpu["peak_bytes"] == peaks[gpu["rank"]]


def test_mp_spawn_starts_the_rank_that_runs(tmp_path):
    script = write(
        tmp_path,
        """
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, size):
    dist.init_process_group("nccl", "tcp://127.0.0.1:1", rank=rank, world_size=size)
    x = torch.ones(2, device=f"cuda:{rank}")
    dist.all_reduce(x)
    print("sum", x.tolist())

if __name__ == "__main__":
    mp.spawn(main, (torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
""",
    )
    done = virtual(tmp_path, "--world", 8, "--as-rank", 6, script)
    assert "sum [8.0, 8.0]" in done.stdout
    assert "rank 6, cuda:6" in done.stdout


def test_a_program_that_cannot_run_twice_has_no_range(tmp_path):
    write(tmp_path, "open('made-once', 'x')\n" + DDP)
    text, numbers = reported(tmp_path, "--world", 2, "--shapes-only", "program.py")
    assert "the second run ended with exit code 1, so the times below are no range" in text
    assert "step" in numbers and "step_at_peaks" not in numbers
    assert "at data-sheet peaks" not in text


def test_steps_end_the_program(tmp_path):
    script = write(tmp_path, DDP.replace("range(4)", "range(10**9)"))
    text, numbers = reported(tmp_path, "--world", 8, "--shapes-only", "--steps", 3, script)
    assert "step 1: loss" in text and "step 2: loss" not in text
    assert numbers["step"]["steps"] == 2
    text, numbers = reported(tmp_path, "--world", 8, "--shapes-only", "--steps", 1, script)
    assert "the only step, with the program's start: let it make more" in text


def test_a_checkpoint_of_a_world(tmp_path):
    """All ranks gather the weights, rank 0 saves them and loads them again."""
    options = "StateDictOptions(full_state_dict=True, cpu_offload=True)"
    program = (
        FSDP
        + f"""
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
state = get_model_state_dict(model, options={options})
if dist.get_rank() == 0:
    torch.save(state, "weights.pt")
    whole = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
    whole.load_state_dict(torch.load("weights.pt", map_location="cuda:0"))
    print(sorted(state), os.path.getsize("weights.pt"))
"""
    )
    script = write(tmp_path, program)
    text, _ = reported(tmp_path, "--world", 8, "--shapes-only", script, 8)
    assert "['0.weight', '1.weight', '2.weight', '3.weight']" in text
    assert "what it saves of them has no numbers" in " ".join(text.split())
    assert (tmp_path / "weights.pt").stat().st_size < 10_000


def test_objects_that_all_ranks_exchange(tmp_path):
    """Their bytes are more than the tensors that keep numbers with --shapes-only."""
    program = (
        BEGIN
        + """
own = {"numbers": list(range(5000)), "rank": dist.get_rank()}
everyones = [None] * dist.get_world_size()
dist.all_gather_object(everyones, own)
gathered = [None] * dist.get_world_size()
dist.gather_object(own, gathered, dst=3)
sent = [own]
dist.broadcast_object_list(sent, src=3)
print(everyones == gathered == [own] * 64, sent == [own])
"""
    )
    world = ("--world", 64, "--as-rank", 3, "--shapes-only")
    done = virtual(tmp_path, *world, write(tmp_path, program))
    assert "True True" in done.stdout, done.stdout


def test_a_program_without_a_step_where_this_machines_gpus_are_hidden(tmp_path):
    use = "print(torch.ones(1).cuda(), os.environ['LOCAL_WORLD_SIZE'])"
    program = write(tmp_path, BEGIN + use)
    done = virtual(tmp_path, "--world", 8, program, CUDA_VISIBLE_DEVICES="")
    assert "no step: no optimizer of torch.optim made a step." in done.stdout
    assert "device='cuda:0') 8\n" in done.stdout, "one node has all ranks"


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (
            DDP + "\nif loss.item() < 0.1:\n    print('small')\n",
            "line 23: a comparison needs numbers, but with --shapes-only",
        ),
        (
            FSDP.replace("tuple(map(int, sys.argv[1:]))", "(4,)"),
            "the mesh 4 has 4 ranks, but the world has 8: give --world 4, or a mesh of 8",
        ),
        (
            BEGIN + "dist.send(torch.ones(2, device=device), 3)",
            "rank 1 calls send with rank 3, which does not run",
        ),
        (
            BEGIN + "dist.scatter_object_list([None], src=0)",
            "rank 1 gets objects from rank 0, which does not run: use --as-rank 0",
        ),
        (
            BEGIN
            + "dist.broadcast_object_list([{1}], src=1)\n"
            + "dist.broadcast_object_list([None], src=0)",
            "rank 1 gets objects from rank 0, which does not run: use --as-rank 0",
        ),
        (
            FSDP.replace("tuple(map(int, sys.argv[1:]))", "(8,)")
            + "import torch.distributed.checkpoint as dcp\n"
            + "dcp.save(model.state_dict(), checkpoint_id='checkpoint')\n",
            "has the shards of all ranks, but of 8 only rank 1 runs: leave it out here, or",
        ),
        (
            BEGIN.replace('"nccl"', '"nccl", rank=0, world_size=2'),
            "the program starts as rank 0 of 2, but this run is rank 1 of 8",
        ),
    ],
)
def test_what_a_world_cannot_know(tmp_path, program, sentence):
    script = write(tmp_path, program)
    done = virtual(tmp_path, "--world", 8, "--as-rank", 1, "--shapes-only", script)
    assert done.returncode == 1
    assert sentence in " ".join(done.stdout.split()), done.stdout


def test_a_rank_that_ignores_sigterm_ends_when_another_fails(monkeypatch):
    monkeypatch.setattr(command, "SECONDS_TO_END", 0.1)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(); time.sleep(60)"
    first = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    first.stdout.readline()
    second = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])

    assert command._wait([first, second]) == 7
    assert first.returncode == -9
    first.stdout.close()
