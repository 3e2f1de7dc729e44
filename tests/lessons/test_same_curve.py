"""Every route reports the same losses and accuracies. The proof compares only the weights."""

import json
import re
from functools import partial

import pytest
from commands import ROOT, run_script, torchrun
from virtual_runs import virtual

ROUTES = {
    "PT_CNN_DataParallel": (),
    "PT_CNN_ModelParallel": ("--micro-batches", 2),
    "PT_CNN_Pipeline": ("--micro-batches", 4),
    "PT_CNN_DDPSpawn": ("--nprocs", 2),
    "PT_CNN_HybridParallel": ("--micro-batches", 3),
    "PT_CNN_MultiGPU": (),
    "PT_CNN_Elastic": (),
    "TF_CNN_MultiGPU": ("--devices", 3),
    "TF_CNN_CustomLoop": ("--devices", 2),
    "TF_CNN_MultiNode": (),
    "PTL_multiGPU": ("--devices", 3),
    "PTL_Strategies": ("--devices", 3),
    "PTL_Precision": ("--devices", 3),
    "PT_CNN_Scaling": (),
}
# Ranks of scripts that torchrun starts.
RANKS = {
    "PT_CNN_Pipeline": 3,
    "PT_CNN_HybridParallel": 2,
    "PT_CNN_MultiGPU": 2,
    "PT_CNN_Scaling": 2,
    "TF_CNN_MultiNode": 2,
}
# Scripts that need virtual GPUs, and how many.
GPUS = {"PT_CNN_DataParallel": 3, "PT_CNN_ModelParallel": 2, "PT_CNN_HybridParallel": 4}
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1")
FLAGS = ("--epochs", 3, "--lr", 0.1)


def curve(stem: str, data, out, *more) -> list[tuple[float, float]]:
    script = ROOT / "scripts" / f"{stem}.py"
    start = partial(torchrun, RANKS[stem]) if stem in RANKS else run_script
    if stem in GPUS:
        ranks = (*TORCHRUN, f"--nproc-per-node={RANKS[stem]}") if stem in RANKS else ()
        start = partial(virtual, out.parent, "--gpus", GPUS[stem], *ranks)
    done = start(script, "--data", data, *FLAGS, *more, "--out", out)
    assert done.returncode == 0, done.stdout
    metrics = json.loads((out / "metrics.json").read_text())
    lines = re.findall(r"^epoch \d+: loss (\S+), accuracy (\S+)$", done.stdout, re.MULTILINE)
    if lines:
        rounded = [(float(loss), float(accuracy)) for loss, accuracy in lines[:-1]]
        return [*rounded, (metrics["loss"], metrics["accuracy"])]
    return [(epoch["loss"], epoch["test_accuracy"]) for epoch in metrics["epochs"]]


@pytest.mark.parametrize("stem", ROUTES)
def test_a_route_reports_what_one_gpu_reports(stem, tmp_path, few_digits):
    """35 images in batches of 12, tested on 7: 2 or 3 ranks divide neither evenly."""
    data = few_digits(35, 7)
    size = ("--batch-size", 12)
    expected = curve("PT_CNN_SingleGPU", data, tmp_path / "one", *size)
    found = curve(stem, data, tmp_path / "many", *size, *ROUTES[stem])
    assert len({accuracy for _, accuracy in expected}) > 1, (
        "an accuracy that never changes would show nothing"
    )
    # The lines of the epochs have 4 digits, metrics.json has all of the last one.
    assert found[-1] == pytest.approx(expected[-1], abs=1e-6)
    for same, one in zip(found, expected, strict=True):
        assert same == pytest.approx(one, abs=1.1e-4)
