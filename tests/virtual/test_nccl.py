"""NCCL, gloo and mp.spawn on virtual GPUs that look like CUDA."""

import json

import pytest
import torch
import torch.distributed as dist
from commands import free_ports, run_script

PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from multigpu.virtual import face
from multigpu.virtual.options import Options

if not face.is_on():  # what `multigpu virtual` does in each process
    face.put_on(Options(gpus=2))


def main(rank, world_size, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    found = {"backend": dist.get_backend(), "nccl": dist.is_nccl_available()}

    try:
        dist.send(torch.ones(2), 1 - rank)
    except RuntimeError as error:
        found["send"] = str(error)
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    found["objects"] = gathered
    group = dist.new_group([0, 1], backend="gloo")
    ones = torch.ones(2)
    dist.all_reduce(ones, group=group)
    on_gpu = torch.ones(2, device="cuda")
    dist.all_reduce(on_gpu, group=group)
    found["gloo"] = [dist.get_backend(group), ones.tolist(), on_gpu.tolist()]
    dist.monitored_barrier(group)
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()

    # torch gives a group without a name the accelerator's backend: NCCL, also for objects.
    os.environ["MASTER_PORT"] = sys.argv[2]
    dist.init_process_group(rank=rank, world_size=world_size)
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        found["unnamed"] = str(error)
    on_gpu = torch.ones(2, device="cuda")
    dist.all_reduce(on_gpu)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = sys.argv[3]
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world_size)
    ones = torch.ones(2)
    dist.all_reduce(ones)
    dist.all_reduce(on_gpu)
    found["both"] = [ones.tolist(), on_gpu.tolist()]
    dist.destroy_process_group()
    with open(os.path.join(folder, f"{rank}.json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    mp.spawn(main, args=(2, sys.argv[4]), nprocs=2)
"""


def test_nccl_gloo_and_a_backend_for_each_device(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run_script(script, *free_ports(3), tmp_path)
    assert done.returncode == 0, done.stdout
    refused = "No backend type associated with device type cpu"
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["backend"] == "nccl" and found["nccl"] is True
        assert found["send"] == refused
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert found["gloo"] == ["gloo", [2, 2], [2, 2]]
        assert refused in found["unnamed"], "a group without a name is NCCL's"
        assert found["both"] == [[2, 2], [4, 4]]


def test_a_future_with_devices(cuda):
    future = torch.futures.Future(devices=[torch.device("cuda:1"), "cuda:0"])
    doubled = future.then(lambda done: done.value() * 2)
    future.set_result(torch.ones(2, device="cuda:1"))
    assert doubled.wait().tolist() == [2, 2]


def test_one_rank_with_options(cuda):
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group(
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        pg_options=options,
        device_id=torch.device("cuda:0"),
    )
    try:
        assert dist.get_backend() == "nccl" and dist.is_backend_available("nccl")
        assert dist.get_default_backend_for_device("cuda:1") == "nccl"
        with pytest.raises(RuntimeError, match="No backend type associated"):
            dist.all_reduce(torch.ones(2))
        tensor = torch.ones(2, device="cuda")
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


def test_an_asynchronous_checkpoint(cuda, tmp_path):
    port = free_ports(1)[0]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
    weights = torch.arange(4.0, device="cuda")
    weights.note = "kept"
    saved = {"plain": weights, "sharded": distribute_tensor(weights * 2, mesh, [Shard(0)])}
    pending = dcp.async_save(saved, checkpoint_id=tmp_path)
    weights.zero_()
    pending.result()
    loaded = {"plain": torch.zeros(4), "sharded": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert loaded["plain"].tolist() == [0, 1, 2, 3]
    assert loaded["sharded"].tolist() == [0, 2, 4, 6]


def test_weights_that_fsdp1_keeps_on_the_host(cuda):
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

    model = FullyShardedDataParallel(
        torch.nn.Linear(4, 2), device_id=0, cpu_offload=CPUOffload(offload_params=True)
    )
    loss = model(torch.ones(3, 4, device="cuda")).sum()
    with pytest.raises(RuntimeError, match=r"use fully_shard\(module, offload_policy=CPUOff"):
        loss.backward()
