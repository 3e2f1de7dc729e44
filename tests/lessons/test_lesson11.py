"""Lesson 11: each precision trains as stated; the proof fails for a broken run."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT, free_ports, planted, run_script
from torch import nn

from multigpu import launch, vgpu
from multigpu.errors import UserError
from multigpu.strategies.dp import wrap_in_data_parallel
from multigpu.trainer.loops.precision import Precision

SCRIPT = ROOT / "scripts" / "PTL_Precision.py"
SHORT = ("--epochs", 1, "--prove")
VGPU = ("--accelerator", "vgpu", "--precision")
# On paper the same training: smaller gradients, and a learning rate larger by the same factor.
SMALL = (*VGPU, "16", "--loss-weight", "1e-5", "--epochs", 1, "--prove")

UNSCALED = """
def on_fit_start(self):
    self.trainer.precision_plugin.scaler = None

lesson.LitCNN.on_fit_start = on_fit_start
"""
REPEATS_COUNT = """
arange = torch.arange
lesson.torch.arange = lambda *a, **k: torch.zeros_like(arange(*a, **k))
"""
OTHER_RATE = """
def configure_optimizers(self):
    return torch.optim.SGD(self.parameters(), 0.04, momentum=0.9)

lesson.LitCNN.configure_optimizers = configure_optimizers
"""
FAULTS = {
    "no loss scaling": (UNSCALED, SMALL),
    "repeated images count": (
        REPEATS_COUNT,
        ("--accelerator", "cpu", "--devices", 2, "--batch-size", 8, *SHORT),
    ),
    "another learning rate": (
        OTHER_RATE,
        ("--accelerator", "cpu", "--precision", "bf16", *SHORT),
    ),
}


def metrics_in(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize(
    ("flags", "name", "limit"),
    [
        (("--accelerator", "cpu"), "32-true", "limit 1e-05: holds"),
        (
            ("--accelerator", "cpu", "--devices", 2, "--precision", "64"),
            "64-true",
            "limit 1e-05: holds",
        ),
        (
            ("--accelerator", "cpu", "--devices", 2, "--precision", "bf16"),
            "bf16-mixed",
            "limit 5e-03: holds",
        ),
        ((*VGPU, "32", "--devices", 2, "--strategy", "dp"), "32-true", "limit 1e-05: holds"),
        ((*VGPU, "16"), "16-mixed", "limit 5e-03: holds"),
        (
            (*VGPU, "bf16", "--gpu", "A100-40GB", "--devices", 2, "--strategy", "dp"),
            "bf16-mixed",
            "limit 5e-03: holds",
        ),
        (SMALL, "16-mixed", "limit 5e-03: holds"),
    ],
)
def test_a_precision_learns_what_it_should(tmp_path, flags, name, limit):
    done = run_script(SCRIPT, *SHORT, *flags, "--out", tmp_path / "o")
    assert done.returncode == 0 and limit in done.stdout and "fails" not in done.stdout, (
        done.stdout
    )
    found = metrics_in(tmp_path / "o")
    assert found["precision"] == name and (tmp_path / "o" / "last.ckpt").exists()
    if "2" in map(str, flags):
        assert found["devices"] == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    text, flags = FAULTS[fault]
    small = ("--data", npz()) if "images" in fault else ()
    done = run_script(
        planted(tmp_path, "PTL_Precision", text),
        *flags,
        *small,
        "--out",
        tmp_path / "o",
    )
    assert done.returncode == 1 and "fails" in done.stdout, done.stdout


def test_ddp2_gives_a_repeated_image_weight_0(tmp_path, npz):
    """A node's batch is cut into chunks, and the repeated image is in the last one."""
    flags = (*VGPU, "32", "--strategy", "ddp2", "--devices", 2, "--batch-size", 8, *SHORT)
    node = {
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_ports(1)[0],
    }

    def run_node(rank: int):
        out = ("--data", npz(), "--out", tmp_path / "o")
        return run_script(SCRIPT, *flags, *out, RANK=rank, **node)

    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.map(run_node, (0, 1))
    assert first.returncode == 0 and "limit 1e-05: holds" in first.stdout, first.stdout
    assert second.returncode == 0, second.stdout


def test_weights_in_bfloat16_lose_small_steps_and_the_proof_says_so(tmp_path):
    flags = (
        "--accelerator",
        "cpu",
        "--precision",
        "bf16-true",
        "--lr",
        0.01,
        "--epochs",
        3,
        "--prove",
    )
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "o")
    assert done.returncode == 1 and "limit 5e-03: fails" in done.stdout, done.stdout
    assert not metrics_in(tmp_path / "o")["proof"]["holds"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--precision", "8"), ("precision", "'8'", "16", "bf16")),
        (
            (*VGPU, "bf16"),
            ("precision", "V100-16GB (virtual)", "bfloat16", "16-mixed"),
        ),
        ((*VGPU, "16", "--gpu", "V200"), ("V200",)),
        (("--accelerator", "tpu"), ("accelerator", "'tpu'")),
        (("--accelerator", "cpu", "--gpu", "T4"), ("--gpu", "--accelerator vgpu")),
        (("--devices", 3, "--batch-size", 8), ("--batch-size 8", "3 devices")),
        (("--data", "no.npz"), ("no.npz",)),
        (("--lr", "3e38"), ("lower --lr",)),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "o")
    assert done.returncode == 2 and done.stdout.count("error: ") == 1, done.stdout
    assert all(word in done.stdout for word in words), done.stdout
    assert "Traceback" not in done.stdout


def test_16_on_the_cpu_becomes_bf16_with_a_warning():
    with pytest.warns(UserWarning, match="bf16-mixed is used instead"):
        assert Precision("16").name == "bf16-mixed"


@pytest.mark.parametrize("gpu", vgpu.GPUS)
def test_who_has_bfloat16(gpu):
    with vgpu.running(1, gpu=gpu) as (place,):
        assert torch.vgpu.is_bf16_supported() and Precision("16", place).name == "16-mixed"
        if not vgpu.GPUS[gpu].bf16:
            with pytest.raises(UserError, match="has no bfloat16"):
                Precision("bf16", place)
        else:
            assert Precision("bf16", place).name == "bf16-mixed"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dp_computes_in_the_callers_autocast(two, dtype):
    """dp with 16 bit. torch's own DataParallel does not pass on the caller's type."""
    model, rows = nn.Linear(4, 3).to(two[0]), torch.ones(4, 4, device=two[0])
    with torch.autocast("vgpu", dtype):
        assert wrap_in_data_parallel(model, two)(rows).dtype == dtype
        assert nn.DataParallel(model, two)(rows).dtype == torch.float32
    assert wrap_in_data_parallel(model, two)(rows).dtype == torch.float32


def test_a_thread_has_an_autocast_type_of_its_own():
    """Why torch's DataParallel computes in float16 under CUDA's bfloat16: the page says so."""
    before, found = torch.get_autocast_dtype("cuda"), []
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    thread = threading.Thread(target=lambda: found.append(torch.get_autocast_dtype("cuda")))
    thread.start()
    thread.join()
    torch.set_autocast_dtype("cuda", before)
    assert found == [torch.float16]


def test_the_experiments(two):
    """Mixed precision needs more memory if weights are large and the batch small."""
    sys.path.insert(0, str(ROOT / "lessons" / "11-precision"))
    from experiments import scales, step

    found = scales(
        torch.rand(8, 1, 8, 8).to(two[0]),
        torch.arange(8).to(two[0]),
        first=2.0**26,
        patience=2,
        steps=12,
    )
    assert found[:3] == [2.0**26, 2.0**25, 2.0**24] and any(
        b == 2 * a for a, b in pairwise(found)
    )
    vgpu.stop()
    held = {
        (name, n): sum(step(name, "A100-40GB", n)[0].values())
        for name in ("32", "bf16")
        for n in (64, 4096)
    }
    assert held["bf16", 64] > held["32", 64] and held["bf16", 4096] < held["32", 4096]


def test_16_bit_slows_an_h100_at_a_small_batch_and_helps_an_a100_most_at_a_large_one():
    """The simulated times that the notebook and the page explain."""
    sys.path.insert(0, str(ROOT / "lessons" / "11-precision"))
    from experiments import speedups

    v100, a100, h100 = (
        speedups(gpu, (64, 4096)) for gpu in ("V100-16GB", "A100-40GB", "H100-80GB")
    )
    assert h100[0] < 0.9 < v100[0] and a100[0] < 1.2
    assert a100[1] > h100[1] > v100[1] > 3.5


def test_the_page_shows_no_answer_before_its_results():
    """The bars of the memory are the answers to two guesses of the notebook."""
    page = (ROOT / "lessons" / "11-precision" / "README.md").read_text()
    before, results = page.split("Read this after the notebook")
    assert "memory.png" not in before and "memory.png" in results
    assert "bits.png" in before
    # The symptoms whose cause the notebook asks for.
    for symptom in ("the loss stands still", "the same loss after each update"):
        assert symptom not in before and symptom in results


def test_the_title_of_the_speeds_is_computed_from_them():
    sys.path.insert(0, str(ROOT / "lessons" / "11-precision"))
    from experiments import draw_speedups

    figure = draw_speedups((8, 16), {"A": [1.5, 3.0], "B": [0.25, 2.0]})
    title = figure.axes[0].get_title()
    assert "0.2 × (B, batch 8)" in title and "3.0 × (A, batch 16)" in title


@pytest.mark.parametrize(("cache", "changes"), [({}, False), ({"cache_enabled": False}, True)])
def test_autocast_keeps_the_weights_of_its_first_forward(cache, changes):
    """The trap that the notebook shows. The Trainer's own test is in test_precision.py."""
    torch.manual_seed(0)
    model, rows = nn.Linear(4, 1), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with torch.autocast("cpu", torch.bfloat16, **cache):
        for _ in range(3):
            loss = model(rows).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert (losses[-1] < losses[0]) == changes
    assert (len(set(losses)) == 1) != changes


def test_a_function_that_says_classes_reaches_its_processes():
    """cloudpickle finds torch.classes by the name `classes`, and cannot pickle it."""
    names = {"torch": torch, "dataset": SimpleNamespace(classes=10)}
    exec("def function():\n    return str(torch.zeros(1)) and dataset.classes == 10", names)
    assert launch.call(names["function"], 1) == [True]
