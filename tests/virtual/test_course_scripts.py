"""The course's scripts as the CUDA programs that they are on a cluster: cuda devices, NCCL."""

import os

import pytest
from commands import ROOT
from virtual_runs import virtual, write

TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
# Lesson 10's strategies that are not exact; tests/prove has the exact ones.
OTHERS = {
    "PTL_Compressed": ("ddp_fp16", "bagua:bytegrad", "bagua:qadam"),
    "PTL_Decentralized": (
        "bagua:decentralized",
        "bagua:low_precision_decentralized",
        "bagua:async",
    ),
}
# Lesson → (GPUs, launcher, script, more flags)
RUNS = {
    "12": (2, TORCHRUN, "PT_CNN_Elastic", ()),
}


on_request = pytest.mark.skipif("ALL_JOBS" not in os.environ, reason="make test-jobs runs it")


def prove(folder, gpus: int, launcher: tuple, script: object, flags: tuple):
    """Run a lesson's script for two epochs with its proof."""
    out = ("--epochs", 2, "--prove", "--out", folder / "out")
    command = (*launcher, script, *out, *flags)
    return virtual(folder, "--gpus", gpus, *command, OMP_NUM_THREADS=1, timeout=240)


@pytest.mark.slow
@on_request
@pytest.mark.parametrize("lesson", RUNS)
def test_a_lessons_proof_holds_on_cuda(tmp_path, lesson):
    gpus, launcher, stem, flags = RUNS[lesson]
    done = prove(tmp_path, gpus, launcher, ROOT / "scripts" / f"{stem}.py", flags)
    assert done.returncode == 0, done.stdout
    proofs = [line for line in done.stdout.splitlines() if line.startswith("proof: ")]
    assert proofs and all(line.endswith(": holds") for line in proofs), done.stdout
    assert f"simulated: {gpus} × V100-16GB" in done.stdout
    assert "cuda:0 " in done.stdout, "the program used a GPU"


@pytest.mark.slow
def test_ddp_over_gloo(tmp_path):
    script = write(
        tmp_path,
        """
import os, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
for device in ("cpu", "cuda"):
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False).to(device))
    model(torch.full((1, 2), 2.0 * dist.get_rank(), device=device)).sum().backward()
    if dist.get_rank() == 0:
        print("gradient", device, model.module.weight.grad.tolist())
""",
    )
    done = virtual(tmp_path, "--gpus", 2, *TORCHRUN, script, OMP_NUM_THREADS=1)
    for device in ("cpu", "cuda"):
        assert f"gradient {device} [[1.0, 1.0]]" in done.stdout, done.stdout


@pytest.mark.slow
@on_request
@pytest.mark.parametrize(
    ("stem", "name"), [(stem, name) for stem, names in OTHERS.items() for name in names]
)
def test_the_other_strategies_run_on_cuda(tmp_path, stem, name):
    script = ROOT / "scripts" / f"{stem}.py"
    flags = ("--strategy", name, "--devices", 2, "--epochs", 1, "--out", tmp_path / "out")
    done = virtual(tmp_path, "--gpus", 2, script, *flags, OMP_NUM_THREADS=1, timeout=240)
    assert done.returncode == 0 and "epoch 1: loss" in done.stdout, done.stdout
    assert "cuda:1 " in done.stdout, "the program used both GPUs"
