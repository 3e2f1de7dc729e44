"""Lesson 11: each precision trains as stated; the proof fails for a broken run."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT, planted, run_script
from torch import nn
from virtual_runs import virtual

import multigpu
from multigpu import launch, prove
from multigpu.errors import UserError
from multigpu.strategies.dp import wrap_in_data_parallel
from multigpu.trainer import Precision
from multigpu.virtual import face

SCRIPT = ROOT / "scripts" / "PTL_Precision.py"
PAGE = ROOT / "lessons" / "11-precision"


@pytest.fixture(autouse=True)
def taken_off():
    yield
    face.take_off()


# ---- the script, proved ---------------------------------------------------------------------


def proved(script, data, *flags, **how) -> prove.Proof:
    """35 images in batches of 8: the last batch has 3, and the sampler repeats an image."""
    words = [script, "--data", data, "--batch-size", 8, "--epochs", 2, "--devices", 2, *flags]
    return prove.run([str(word) for word in words], steps=6, timeout=100, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "how"),
    [(("--precision", "64"), {}), (("--precision", "32", "--strategy", "dp"), {"gpus": 2})],
    ids=["ddp in 64 bit", "dp in 32 bit"],
)
def test_two_devices_learn_what_one_learns(in_forks, few_digits, flags, how):
    found = proved(SCRIPT, few_digits(), *flags, **how)
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_where_repeated_images_count_the_proof_does_not_hold(in_forks, tmp_path, few_digits):
    fault = """
def mean_of_all_rows(self, losses):
    self.log("loss", losses.mean(), on_step=False, on_epoch=True)
    return losses.mean()

lesson.LitCNN.training_step_end = mean_of_all_rows
"""
    found = proved(planted(tmp_path, "PTL_Precision", fault), few_digits())
    assert found.verdict != "holds", str(found)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--precision", "8"), ("precision", "'8'", "16", "bf16")),
        (("--precision", "bf16", "--devices", 1), ("bfloat16", "16-mixed")),
        (("--devices", 2, "--batch-size", 9), ("--batch-size must be a multiple",)),
        (("--epochs", 0), ("--epochs",)),
        (("--data", "no.npz"), ("no.npz",)),
        (("--lr", "3e38"), ("lower --lr",)),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    out = ("--out", tmp_path / "o")
    if "bf16" in flags:
        done = virtual(tmp_path, "--gpus", 1, "--gpu", "V100-16GB", SCRIPT, *flags, *out)
    else:
        done = run_script(SCRIPT, *flags, *out)
    assert done.returncode != 0
    assert all(word in done.stdout for word in words), done.stdout
    assert "Traceback" not in done.stdout and "vgpu" not in done.stdout, done.stdout


# ---- in 16 bit, by metrics ------------------------------------------------------------------


def test_16_bit_learns_the_same_with_the_same_learning_rate_alone(experiments, capsys):
    exact = experiments.trained("32", max_epochs=1)[1]
    for precision, lr, same in (("bf16", 0.05, True), ("bf16", 0.04, False)):
        found = experiments.trained(precision, lr, max_epochs=1)[1]
        assert experiments.learns_the_same(precision, found, exact) == same
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        "holds",
        "fails",
    ]


@pytest.mark.slow
def test_a_small_loss_needs_the_scale(experiments, monkeypatch):
    """A loss × 1e-5, with a learning rate larger by as much: on paper the same training."""
    exact = experiments.trained("32", max_epochs=1)[1]

    class Small(experiments.LitCNN):
        scaled = True

        def on_fit_start(self):
            if not self.scaled:
                self.trainer.precision_plugin.scaler = None

        def training_step_end(self, losses):
            return 1e-5 * super().training_step_end(losses)

    monkeypatch.setattr(experiments, "LitCNN", Small)
    with multigpu.gpus(1, gpu="V100-16GB"):
        for scaled in (True, False):
            Small.scaled = scaled
            found = experiments.trained("16", 0.05e5, accelerator="gpu", max_epochs=1)[1]
            assert experiments.learns_the_same("16-mixed", found, exact) == scaled


@pytest.mark.slow
def test_16_mixed_trains_with_dp_and_ddp_as_on_one_gpu(experiments):
    exact = experiments.trained("32", max_steps=3, limit_val_batches=0, callbacks=[])[0]
    modules = [experiments.three_steps("single_device", 1), experiments.three_steps("dp", 2)]
    modules += launch.call(experiments.three_steps, 2, "ddp", 2)
    for module in modules:
        assert 0 < experiments.proof.difference(module, exact) < 1e-4


# ---- which hardware supports what -----------------------------------------------------------


def test_16_on_the_cpu_becomes_bf16_with_a_warning():
    with pytest.warns(UserWarning, match="bf16-mixed is used instead"):
        assert Precision("16").name == "bf16-mixed"


@pytest.mark.parametrize("gpu", multigpu.GPUS)
def test_who_has_bfloat16(gpu):
    with multigpu.gpus(1, gpu=gpu) as (place,):
        assert Precision("16", place).name == "16-mixed"
        if multigpu.GPUS[gpu].bf16:
            assert Precision("bf16", place).name == "bf16-mixed"
        else:
            with pytest.raises(UserError, match="has no bfloat16"):
                Precision("bf16", place)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dp_computes_in_the_callers_autocast(two, dtype):
    """dp with 16 bit. torch's own DataParallel does not pass on the caller's type."""
    model, rows = nn.Linear(4, 3).to(two[0]), torch.ones(4, 4, device=two[0])
    with torch.autocast("vgpu", dtype):
        assert wrap_in_data_parallel(model, two)(rows).dtype == dtype
        assert nn.DataParallel(model, two)(rows).dtype == torch.float32
    assert wrap_in_data_parallel(model, two)(rows).dtype == torch.float32


# ---- the experiments ------------------------------------------------------------------------


def test_the_scale_falls_after_each_overflow_and_rises_after_good_steps(experiments):
    with multigpu.gpus(1, gpu="V100-16GB") as (gpu,):
        images, labels = torch.rand(8, 1, 8, 8).to(gpu), torch.arange(8).to(gpu)
        found = experiments.scales(images, labels, first=2.0**26, patience=2, steps=12)
    assert found[:3] == [2.0**26, 2.0**25, 2.0**24]
    assert any(later == 2 * earlier for earlier, later in pairwise(found))


def test_mixed_precision_needs_more_memory_for_large_weights_and_a_small_batch(experiments):
    held = {
        (name, n): sum(experiments.step(name, "A100-40GB", n)[0].values())
        for name in ("32", "bf16")
        for n in (64, 4096)
    }
    assert held["bf16", 64] > held["32", 64] and held["bf16", 4096] < held["32", 4096]


def test_16_bit_slows_an_h100_at_a_small_batch_and_helps_an_a100_most_at_a_large_one(
    experiments,
):
    """The simulated times that the notebook explains."""
    v100, a100, h100 = (
        experiments.speedups(gpu, (64, 4096))
        for gpu in ("V100-16GB", "A100-40GB", "H100-80GB")
    )
    assert h100[0] < 0.9 < v100[0] and a100[0] < 1.2
    assert a100[1] > h100[1] > v100[1] > 3.5


def test_a_function_that_says_classes_reaches_its_processes():
    """cloudpickle finds torch.classes by the name `classes`, and cannot pickle it."""
    names = {"torch": torch, "dataset": SimpleNamespace(classes=10)}
    exec("def function():\n    return str(torch.zeros(1)) and dataset.classes == 10", names)
    assert launch.call(names["function"], 1) == [True]
