"""Lesson 15: ZeRO by hand, fully_shard, what they keep and send, and the script's proof."""

import builtins
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import proofs
import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, run_script, torchrun
from virtual_runs import virtual

from multigpu import launch, prove

PAGE = ROOT / "lessons" / "15-fsdp"
SCRIPT = ROOT / "scripts" / "PT_GPT_FSDP.py"
ZERO = PAGE / "zero.py"
PARTS = ("weights", "gradients", "optimizer")


@pytest.fixture
def zero(experiments):
    """lessons/15-fsdp/zero.py."""
    import zero

    return zero


def without_sync(fsdp, model, lr, mesh):
    optimizer = fsdp(model, lr, mesh)
    model.set_requires_gradient_sync(False)
    return optimizer


def changed(right: str, wrong: str) -> SimpleNamespace:
    """zero.py's names, with a text replaced."""
    text = ZERO.read_text()
    assert right in text
    names = {"__name__": "changed", "__builtins__": builtins}
    exec(compile(text.replace(right, wrong), "changed", "exec"), names)
    return SimpleNamespace(**names)


def off(experiments, shares: list, ranks: int = 2, **options) -> list[float]:
    """For each way to share: the largest difference of a weight to the serial run's."""
    (serial,) = experiments.train([None])
    of_ranks = launch.call(experiments.train, ranks, shares, **options)
    return [
        max((found - serial).abs().max().item() for found in each)
        for each in zip(*of_ranks, strict=True)
    ]


def test_all_ways_to_share_compute_what_one_gpu_computes(experiments, zero):
    script = experiments.script
    kept = partial(script.fsdp, reshard_after_forward=False)
    shares = [zero.Zero1, zero.Zero2, zero.Zero3, script.fsdp, kept]
    assert max(off(experiments, shares)) < 1e-10


def step_of_two_backwards(stages: list) -> list[torch.Tensor]:
    """For each stage: all weights after a step whose gradient is of two backwards."""
    import experiments

    def step(model, optimizer, tokens):
        for rows in tokens.chunk(2):
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            (loss / 2).backward()
        optimizer.step()

    experiments.script.train_step = step
    return experiments.train(stages, steps=1)


def test_gradients_of_two_backwards_are_added(experiments, zero):
    stages = [zero.Zero1, zero.Zero2, zero.Zero3]
    (serial,) = experiments.train([None], steps=1)
    for found in launch.call(step_of_two_backwards, 2, stages)[0]:
        assert (found - serial).abs().max().item() < 1e-10


@pytest.mark.slow
def test_groups_that_share_compute_what_one_gpu_computes(experiments):
    assert max(off(experiments, [experiments.script.fsdp], ranks=4, shape=(2, 2))) < 1e-10


PARTS_OF = ".view(-1).chunk(self.ranks)"
OWN = f"{PARTS_OF}[self.mesh.get_local_rank()]"
REDUCED = f"dist.reduce_scatter(mean, [*weight.grad.div_(self.ranks){PARTS_OF}])"
GATHERED = f"dist.all_gather([*weight.data{PARTS_OF}], part)"
FAULTS = {
    REDUCED: f"mean.copy_(weight.grad{OWN})",  # its own gradient
    ".div_(self.ranks)": "",  # the sum
    GATHERED: f"weight.data{OWN}.copy_(part)",  # its own part
}


def test_without_one_of_the_exchanges_the_weights_are_others(experiments):
    stages = [
        getattr(changed(*fault), stage)
        for fault in FAULTS.items()
        for stage in ("Zero1", "Zero2", "Zero3")
    ]
    stages.append(partial(without_sync, experiments.script.fsdp))
    assert min(off(experiments, stages)) > 1e-5


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rank_keeps_what_zeros_table_says(experiments, zero, ranks):
    for stage, share in enumerate((zero.Zero1, zero.Zero2, zero.Zero3), 1):
        found = experiments.step(share, ranks, layers=2)
        expected = experiments.table(stage, ranks)
        assert found.bytes == pytest.approx(expected, rel=0.01), stage
    torchs = experiments.step(experiments.script.fsdp, ranks, layers=2)
    for part in PARTS:
        assert getattr(torchs, part) == pytest.approx(getattr(found, part), abs=0.05)


def test_with_whole_gradients_it_keeps_more(experiments):
    right = "part, mean, weight.grad = "
    zero2 = changed(right, "part, mean, _ = ").Zero2
    assert experiments.step(zero2, 4, layers=2).bytes == pytest.approx(11, abs=0.1)


def test_one_of_many_ranks_leaves_the_process_as_it_was(experiments):
    before = dict(os.environ)
    options = experiments.Options(gpus=8, world=8, shapes_only=True)
    with pytest.raises(ZeroDivisionError), experiments.face.first_rank(options):
        raise ZeroDivisionError
    assert dict(os.environ) == before and not torch.distributed.is_initialized()


# ---- the script -----------------------------------------------------------------------------


def proof(tmp_path: Path, data: Path, program: Path = SCRIPT, **fault: str) -> prove.Proof:
    return proofs.proof(program, tmp_path, "--data", data, "--batch-size", 8, **fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [pytest.param(SCRIPT, marks=pytest.mark.long), ZERO], ids=["fsdp", "ZeRO-3"]
)
def test_two_ranks_equal_one(in_forks, tmp_path, few_digits, program):
    found = proof(tmp_path, few_digits(), program)
    assert found.verdict == "holds", str(found)
    # The runs that round otherwise have ended, too: also where a weight has no memory.
    assert not any("rounding" in note for note in found.notes), found.notes


@pytest.mark.slow
def test_with_other_rows_the_proof_fails(in_forks, tmp_path, few_digits):
    found = proof(tmp_path, few_digits(), right="rows[rank::ranks]", wrong="rows[::ranks]")
    assert found.verdict == "fails", str(found)


def test_two_ranks_save_the_whole_model(tmp_path, few_digits):
    flags = ("--data", few_digits(), "--batch-size", 8, "--epochs", 1)
    runs = {
        "serial": run_script(SCRIPT, *flags, "--out", tmp_path / "serial"),
        "3": torchrun(2, ZERO, *flags, "--stage", 3, "--out", tmp_path / "3"),
        "fsdp": torchrun(2, SCRIPT, *flags, "--out", tmp_path / "fsdp"),
    }
    losses, models = {}, {}
    for name, done in runs.items():
        assert done.returncode == 0, done.stdout
        losses[name] = json.loads((tmp_path / name / "metrics.json").read_text())["loss"]
        models[name] = torch.load(tmp_path / name / "model.pt")
    for name in ("3", "fsdp"):
        assert losses[name] == pytest.approx(losses["serial"], rel=1e-4)
        for weight, whole in models["serial"].items():
            found = models[name][weight]
            assert type(found) is torch.Tensor
            assert (found - whole).abs().median() < 1e-6, weight


@pytest.mark.slow
def test_the_script_shares_in_groups_on_virtual_gpus(tmp_path, few_digits):
    launcher = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4")
    flags = ("--data", few_digits(), "--batch-size", 8, "--epochs", 1, "--group", 2)
    half = ("--precision", "bf16-mixed", "--out", tmp_path / "o")
    done = virtual(tmp_path, "--gpus", 4, *launcher, SCRIPT, *flags, *half)
    assert done.returncode == 0, done.stdout
    assert "epoch 1: loss" in done.stdout
