"""Lesson 11: each precision trains as stated; the proof fails for a broken run."""

from types import SimpleNamespace

import pytest
import torch
from commands import ROOT, planted
from torch import nn

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


@pytest.mark.long
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


# ---- which hardware supports what -----------------------------------------------------------


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


def test_a_function_that_says_classes_reaches_its_processes():
    """cloudpickle finds torch.classes by the name `classes`, and cannot pickle it."""
    names = {"torch": torch, "dataset": SimpleNamespace(classes=10)}
    exec("def function():\n    return str(torch.zeros(1)) and dataset.classes == 10", names)
    assert launch.call(names["function"], 1) == [True]
