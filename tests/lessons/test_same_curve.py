"""Every route reports the same losses and accuracies. The proof compares only the weights."""

import json

import pytest
from commands import ROOT, run_script

ROUTES = {
    "PT_CNN_DataParallel": (),
    "PT_CNN_ModelParallel": ("--micro-batches", 2),
    "PT_CNN_Pipeline": ("--micro-batches", 4, "--spawn", 3),
    "PT_CNN_DDPSpawn": ("--nprocs", 2),
    "PT_CNN_MultiGPU": ("--spawn", 2),
    "PT_CNN_Elastic": (),
    "PT_CNN_HybridParallel": ("--spawn", 3, "--micro-batches", 2),
    "TF_CNN_MultiGPU": ("--devices", 3),
    "TF_CNN_CustomLoop": ("--devices", 2),
    "TF_CNN_MultiNode": ("--spawn", 2),
    "PTL_multiGPU": ("--devices", 3),
    "PTL_Precision": ("--devices", 3),
    "PT_CNN_Scaling": ("--spawn", 2),
}
FLAGS = ("--epochs", 3, "--lr", 0.1)


def curve(stem: str, data, out, *more) -> list[tuple[float, float]]:
    script = ROOT / "scripts" / f"{stem}.py"
    done = run_script(script, "--data", data, *FLAGS, *more, "--out", out)
    assert done.returncode == 0, done.stdout
    epochs = json.loads((out / "metrics.json").read_text())["epochs"]
    return [(epoch["loss"], epoch["test_accuracy"]) for epoch in epochs]


@pytest.mark.parametrize("stem", ROUTES)
def test_a_route_reports_what_one_gpu_reports(stem, tmp_path, npz):
    """35 images in batches of 12, tested on 7: 2 or 3 ranks divide neither evenly."""
    data = npz(35, 7)
    size = ("--batch-size", 12)
    expected = curve("PT_CNN_SingleGPU", data, tmp_path / "one", *size)
    found = curve(stem, data, tmp_path / "many", *size, *ROUTES[stem])
    assert len({accuracy for _, accuracy in expected}) > 1, (
        "an accuracy that never changes would show nothing"
    )
    for (loss, accuracy), (same_loss, same_accuracy) in zip(expected, found, strict=True):
        assert same_loss == pytest.approx(loss, abs=1e-6)
        assert same_accuracy == pytest.approx(accuracy, abs=1e-6)
