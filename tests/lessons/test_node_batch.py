"""Lesson 10, ddp2: the loss of a node has the rows of all its GPUs, and of no other node."""

import json

import pytest
import torch
from commands import ROOT, planted, run
from torch import nn

import multigpu
from multigpu import prove
from multigpu.virtual import face

PAGE = ROOT / "lessons" / "10-strategies"
SCRIPT = ROOT / "scripts" / "PTL_NodeBatch.py"
# Each GPU compares its own rows, as in ddp.
OWN_ROWS = """
nce = lesson.info_nce
lesson.info_nce = lambda a, b: (nce(a[::2], b[::2]) + nce(a[1::2], b[1::2])) / 2
"""


def proved(script, data, nodes: int) -> prove.Proof:
    flags = ["--data", data, "--batch-size", 12, "--epochs", 2]
    start = ["bash", PAGE / "two_nodes.sh"] if nodes == 2 else []
    reference = ["python", SCRIPT, *flags, "--serial", nodes]
    return prove.run(
        [str(word) for word in (*start, script, *flags)],
        reference=" ".join(map(str, reference)),
        gpus=2 if nodes == 1 else None,
        steps=4,
        timeout=100,
    )


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ddp2_learns_from_the_nodes_batches(in_forks, few_digits, nodes):
    found = proved(SCRIPT, few_digits(), nodes)
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_with_a_loss_of_each_gpus_rows_the_proof_does_not_hold(in_forks, tmp_path, few_digits):
    found = proved(planted(tmp_path, "PTL_NodeBatch", OWN_ROWS), few_digits(), 1)
    assert found.verdict != "holds", str(found)


@pytest.mark.slow
def test_two_nodes_write_one_result(tmp_path, few_digits):
    flags = ("--data", few_digits(), "--batch-size", 12, "--epochs", 1, "--out", tmp_path)
    done = run("bash", PAGE / "two_nodes.sh", SCRIPT, *flags)
    assert done.returncode == 0 and done.stdout.count("epoch 1: ") == 1, done.stdout
    numbers = json.loads((tmp_path / "metrics.json").read_text())
    assert numbers.keys() == {"loss", "accuracy"}
    assert (tmp_path / "model.pt").exists()


def test_dp_gathers_on_dimension_0():
    """So torch.cat(outputs, dim=1), which Lightning's old manual has, gets one tensor."""
    model = nn.Identity()
    model.forward = lambda rows: torch.softmax(rows, 0)
    with multigpu.gpus(2, gpu="V100-16GB") as gpus:
        rows = torch.arange(10.0).reshape(10, 1).to(gpus[0])
        outputs = nn.DataParallel(model, gpus)(rows).cpu()
    face.take_off()
    assert outputs.shape == (10, 1) and outputs.sum().item() == pytest.approx(2)
