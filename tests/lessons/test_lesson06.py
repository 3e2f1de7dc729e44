"""Lesson 06: DDP over ranks with a model on two GPUs each learns what one GPU learns."""

import sys

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, SILENT_DDP, free_ports, planted
from torch import nn
from virtual_runs import virtual

import multigpu
from multigpu import prove
from multigpu.models import CNN

sys.path.insert(0, str(ROOT / "scripts"))

SCRIPT = ROOT / "scripts" / "PT_CNN_HybridParallel.py"
PAGE = ROOT / "lessons" / "06-hybrid-parallel"
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
# 35 images: the last batch has 3, and the sampler repeats an image.
FLAGS = ("--batch-size", 8, "--micro-batches", 3, "--epochs", 2)


def proof(path, data) -> prove.Proof:
    words = [*TORCHRUN, path, "--data", data, *FLAGS]
    return prove.run([str(word) for word in words], gpus=4, steps=6, timeout=100)


@pytest.mark.long
@pytest.mark.slow
def test_two_replicas_of_two_stages_learn_what_one_gpu_learns(in_forks, few_digits):
    found = proof(SCRIPT, few_digits())
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_without_an_all_reduce_the_proof_fails(in_forks, few_digits, tmp_path):
    found = proof(planted(tmp_path, "PT_CNN_HybridParallel", SILENT_DDP), few_digits())
    assert found.verdict == "fails", str(found)
    assert "step with their own gradients" in found.line


def test_under_srun_too_a_batch_that_the_ranks_cannot_share_is_one_sentence(tmp_path):
    rank = {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1, "SLURM_LOCALID": 0}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    words = ("--gpus", 2, SCRIPT, "--batch-size", 0)
    done = virtual(tmp_path, *words, **rank, **address)
    assert "error: --batch-size must be a multiple of" in done.stdout
    assert "Traceback" not in done.stdout


def test_in_the_shell_of_a_job_which_is_no_rank_it_names_torchrun(tmp_path):
    done = virtual(tmp_path, "--gpus", 2, SCRIPT, SLURM_PROCID=0, SLURM_LOCALID=0)
    assert "It needs torchrun and two GPUs for each rank." in done.stdout
    assert "Traceback" not in done.stdout


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [weight.grad.cpu() for weight in model.parameters()]


@pytest.mark.parametrize("in_flight", [(1, 1), (2, 1), (3, 1), (4, 4), (5, 3)])
def test_overlapped_orders_have_the_serial_gradients(experiments, in_flight):
    """Two ranks one after the other: the sum of their gradients is the serial gradient."""
    torch.manual_seed(0)
    serial = CNN()
    images, labels = torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    F.cross_entropy(serial(images), labels).backward()
    with multigpu.gpus(2, gpu="V100-16GB") as gpus:
        torch.manual_seed(0)
        stages = experiments.cnn_stages(CNN(), 7, gpus, 4)
        order = experiments.Overlapped(stages, in_flight)
        for rows, classes in zip(images.chunk(2), labels.chunk(2), strict=True):
            order.backward(rows.to(gpus[0]), classes.to(gpus[1]), ranks=2)
        pairs = zip(gradients(stages), gradients(serial), strict=True)
        assert max((a - b).abs().max().item() for a, b in pairs) < 1e-7
