"""Which command a proof takes as the reference, and where it runs."""

import sys
from pathlib import Path

import pytest

from multigpu.prove import plan

MODULE = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Path("cpu.py").write_text("import torch\n")
    Path("gpu.py").write_text('import torch\ndevice = "cuda:0"\n')
    Path("with_gpu_module.py").write_text("import gpu\n")


@pytest.mark.parametrize(
    ("command", "reference"),
    [
        ("torchrun --nproc-per-node=2 cpu.py -n 2", "torchrun --nproc-per-node=1 cpu.py -n 2"),
        ("torchrun --nproc_per_node 4 cpu.py", "torchrun --nproc_per_node 1 cpu.py"),
        ("torchrun --nproc-per-node=gpu cpu.py", "torchrun --nproc-per-node=1 cpu.py"),
        ("mpirun -np 2 python cpu.py", "mpirun -np 1 python cpu.py"),
        ("srun --ntasks=8 python cpu.py", "srun --ntasks=1 python cpu.py"),
        (
            "accelerate launch --num_processes 2 cpu.py",
            "accelerate launch --num_processes 1 cpu.py",
        ),
        ("fabric run --devices 2 cpu.py", "fabric run --devices 1 cpu.py"),
    ],
)
def test_the_reference_has_one_process(monkeypatch, command, reference):
    monkeypatch.setattr(plan, "command_line", list)
    assert plan.make(command.split()).reference == reference.split()


def test_a_program_without_a_launcher_is_its_own_reference_on_one_gpu():
    made = plan.make(["gpu.py"], gpus=3)
    assert made.reference == made.command and (made.gpus, made.ranks) == (3, None)


def test_a_program_that_says_cuda_runs_on_as_many_virtual_gpus_as_ranks():
    for script, gpus in (("cpu.py", None), ("gpu.py", 4), ("with_gpu_module.py", 4)):
        assert plan.make(["torchrun", "--nproc-per-node=4", script]).gpus == gpus


def test_hidden_gpus_are_not_replaced_by_virtual_ones(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plan.make(["torchrun", "--nproc-per-node=4", "gpu.py"]).gpus is None


def test_real_gpus_are_used_where_the_machine_has_them(monkeypatch):
    monkeypatch.setattr(plan, "real_gpus", lambda: 8)
    made = plan.make(["torchrun", "--nproc-per-node=2", "gpu.py"])
    assert made.real and made.gpus is None
    assert not plan.make(["torchrun", "--nproc-per-node=2", "gpu.py"], gpus=2).real


def test_flags_that_a_reference_would_change():
    words = ["train.py", "--devices", "2", "--batch-size=32", "--lr", "2"]
    assert plan.with_one(words) == ["train.py", "--devices", "1", *words[3:]]
    assert plan.with_batch_times(words, 2)[3] == "--batch-size=64"
    assert plan.with_one(["train.py", "2"]) is None
    for flag in ("--trainer.devices=", "trainer.devices="):
        assert plan.with_one(["train.py", f"{flag}2"]) == ["train.py", f"{flag}1"]
    for flag in ("--data.batch_size=", "data.batch_size="):
        assert plan.with_batch_times(["train.py", f"{flag}8"], 2)[1] == f"{flag}16"
    assert plan.with_batch_times(["train.py"], 2) is None


@pytest.mark.parametrize(("gpus", "real"), [(1, False), (2, True), (8, True)])
def test_fewer_gpus_than_ranks_are_not_used(monkeypatch, gpus, real):
    monkeypatch.setattr(plan, "real_gpus", lambda: gpus)
    made = plan.make(["torchrun", "--nproc-per-node=2", "gpu.py"])
    assert (made.real, made.gpus) == (real, None if real else 2)
    # A program that starts no ranks itself: one GPU would be compared with itself.
    assert plan.make(["gpu.py"]).real == real
