"""Lesson 05: DDP in 40 lines of plain torch, the script's proof, and the experiments."""

import os
import re
from pathlib import Path

import proofs
import pytest
import torch
import torch.distributed as dist
import warm
from commands import INSTRUMENTED, ROOT, run, run_script, torchrun
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from virtual_runs import virtual

from multigpu import launch, prove
from multigpu.errors import UserError

PAGE = ROOT / "lessons" / "05-ddp-cluster"
SCRIPT = ROOT / "scripts" / "PT_CNN_MultiGPU.py"


# ---- 40 lines of plain torch ----------------------------------------------------------------


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory) -> Path:
    """The weights of one_gpu.py."""
    path = tmp_path_factory.mktemp("one_gpu") / "weights.pt"
    done = run_script(PAGE / "one_gpu.py", path)
    assert done.returncode == 0, done.stdout
    assert float(re.search(r"test accuracy (\S+)", done.stdout)[1]) > 0.85
    return path


def difference(path: Path, other: Path) -> float:
    """The largest difference between two files of weights."""
    weights, others = torch.load(path), torch.load(other)
    assert weights.keys() == others.keys()
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


@pytest.mark.slow
def test_two_ranks_give_the_weights_of_one_gpu(tmp_path, one_gpu):
    """Really started, because a warm process has other imports.

    One thread is left at the end. A thread of gloo that outlives Python aborts about one run
    in a hundred (launch/exit.py).
    """
    path = tmp_path / "ddp.py"
    # One write, so that no other rank writes in between.
    threads = 'os.write(1, b"threads: %d\\n" % len(os.listdir("/proc/self/task")))\n'
    path.write_text((PAGE / "ddp.py").read_text() + threads)
    launcher = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    done = run(*launcher, path, tmp_path / "ddp.pt")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("2 × cpu") == 1, "rank 0 alone prints"
    assert done.stdout.count("threads: 1\n") == 2, done.stdout
    assert difference(tmp_path / "ddp.pt", one_gpu) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("F.cross_entropy(ddp(", "F.cross_entropy(model("),  # no average
        ("sampler.set_epoch(epoch)", "sampler.set_epoch(0)"),
        ("120 // ranks", "120"),
        (":1440]", ":1437]"),  # the last batch is uneven
    ],
)
def test_with_a_fault_the_weights_are_others(tmp_path, one_gpu, right, wrong):
    text = (PAGE / "ddp.py").read_text()
    assert right in text
    path = tmp_path / "fault.py"
    path.write_text(text.replace(right, wrong))
    done = torchrun(2, path, tmp_path / "ddp.pt")
    assert done.returncode == 0, done.stdout
    assert difference(tmp_path / "ddp.pt", one_gpu) > 1e-4


@pytest.mark.parametrize("name", ["ddp.py", "one_gpu.py"])
def test_plain_torch_uses_nothing_of_the_course(name):
    assert "multigpu" not in (PAGE / name).read_text()


# ---- the script -----------------------------------------------------------------------------


def proof(tmp_path, data: Path, right: str = "", wrong: str = "") -> prove.Proof:
    """Two ranks with two micro-batches a step, one epoch and a step of the next.

    35 images in batches of 8: the last batch has 3, and the sampler repeats an image.
    """
    flags = ("--data", data, "--batch-size", 8, "--accumulate", 2)
    return proofs.proof(SCRIPT, tmp_path, *flags, right=right, wrong=wrong, steps=6)


@pytest.mark.slow
def test_two_ranks_with_micro_batches_compute_what_one_gpu_computes(
    in_forks, tmp_path, few_digits
):
    found = proof(tmp_path, few_digits())
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_with_the_mean_over_a_ranks_own_images_the_proof_fails(in_forks, tmp_path, few_digits):
    found = proof(
        tmp_path, few_digits(), "loss * ranks / images_in_step", "loss / weight.sum()"
    )
    assert found.verdict == "fails", str(found)


def test_micro_batches_do_not_cost_all_reduces(tmp_path, few_digits):
    """The gradients fit in one bucket: one all-reduce a step, whatever its micro-batches."""
    flags = ("--data", few_digits(32), "--epochs", 1, "--batch-size", 8, "--accumulate", 4)
    plant = f"count={tmp_path / 'count'}"
    done = torchrun(2, INSTRUMENTED, *flags, "--out", tmp_path, PLANT=plant)
    assert done.returncode == 0, done.stdout
    assert int((tmp_path / "count").read_text()) == 4


def test_a_run_is_resumed_with_its_own_settings_alone(tmp_path, few_digits):
    flags = ("--data", few_digits(), "--batch-size", 7, "--out", tmp_path)
    assert run_script(SCRIPT, *flags, "--epochs", 1).returncode == 0
    resume = ("--resume", tmp_path / "last.pt", "--epochs", 2)
    done = run_script(SCRIPT, *flags, *resume, "--lr", 0.1)
    assert done.returncode != 0
    assert "'lr': 0.05" in done.stdout and done.stdout.count("\n") == 1, done.stdout
    assert run_script(SCRIPT, *flags, *resume).returncode == 0


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1}, (3, 4, 1)),
        # A batch job's shell is one process; srun adds the number of its tasks.
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_LOCALID": 0}, (0, 1, 0)),
        ({"SLURM_PROCID": 3, "SLURM_STEP_NUM_TASKS": 4, "SLURM_LOCALID": 1}, (3, 4, 1)),
    ],
    ids=["alone", "torchrun", "sbatch", "srun"],
)
def test_the_rank_comes_from_the_launcher(variables, found):
    program = "from PT_CNN_MultiGPU import find_rank; print(*find_rank())"
    environment = {"PYTHONPATH": SCRIPT.parent, **variables}
    done = run(warm.python(), "-c", program, **environment)
    assert done.stdout.split() == [str(number) for number in found], done.stdout


@pytest.mark.parametrize(("gpus", "chosen"), [(2, 1), (1, 0)])
def test_a_rank_takes_the_gpu_of_its_local_rank(tmp_path, gpus, chosen):
    """Rank 3 of 4, the second on its node; srun can show it its own GPU alone."""
    program = (
        "import torch, torch.distributed as dist, PT_CNN_MultiGPU as lesson\n"
        "dist.init_process_group = lambda *arguments, **keywords: None\n"
        "print(lesson.join(3, 4, 1), torch.cuda.current_device())\n"
    )
    (tmp_path / "rank.py").write_text(program)
    environment = {"PYTHONPATH": SCRIPT.parent, "MASTER_PORT": 1}
    done = virtual(tmp_path, "--gpus", gpus, "rank.py", **environment)
    assert f"cuda:{chosen} {chosen}\n" in done.stdout, done.stdout


def test_several_ranks_need_an_address(tmp_path):
    variables = {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": 0}
    done = run_script(SCRIPT, cwd=tmp_path, **variables)
    assert done.returncode != 0 and done.stdout.startswith("Export MASTER_ADDR"), done.stdout


# ---- the notebook's experiments -------------------------------------------------------------


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


# ---- the notebook's "To go further" ---------------------------------------------------------


class HalfUsed(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.used(rows)


def error_of_two_steps(settings: dict, debug: str = "OFF") -> str:
    """The text of the error in two steps of HalfUsed with DDP; "" if there is none."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = debug
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo")
    ddp = DDP(HalfUsed(), **settings)
    text = ""
    try:
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        text = str(error)
    del ddp  # before its group: DDP can hang if it drops the last reference
    dist.destroy_process_group()
    return text


@pytest.mark.slow
def test_a_layer_without_a_gradient():
    for debug, names in (("OFF", False), ("INFO", True)):
        error = launch.call(error_of_two_steps, 2, {}, debug)[0]
        assert "Expected to have finished reduction in the prior iteration" in error
        assert ("unused.weight" in error) == names
    for setting in ("find_unused_parameters", "static_graph"):
        assert launch.call(error_of_two_steps, 2, {setting: True}) == ["", ""]


@pytest.mark.slow
def test_torch_crashes_with_the_debug_level_detail():
    """On gloo. If it no longer does, remove the notebook's sentence about DETAIL."""
    with pytest.raises(UserError, match="SIGSEGV"):
        launch.call(error_of_two_steps, 2, {"find_unused_parameters": True}, "DETAIL")


def gradients_of_uneven_ranks() -> list[float]:
    """Rank 0 has three batches, rank 1 two. The gradients of a weight with the input 1."""
    dist.init_process_group("gloo")
    ddp = DDP(nn.Linear(1, 1, bias=False))
    found = []
    with ddp.join():
        for _ in range(3 - dist.get_rank()):
            ddp.zero_grad()
            ddp(torch.ones(1, 1)).sum().backward()
            found.append(ddp.module.weight.grad.item())
    return found


@pytest.mark.slow
def test_join_sends_zeros_and_divides_by_all_ranks():
    assert launch.call(gradients_of_uneven_ranks, 2) == [[1, 1, 0.5], [1, 1]]
