"""Lesson 06: DDP over a model on two GPUs learns what one GPU learns."""

import json
import sys

import pytest
import torch
from commands import ROOT, SILENT_DDP, planted, run_script

from multigpu import vgpu

SCRIPT = ROOT / "scripts" / "PT_CNN_HybridParallel.py"
FLAGS = ("--epochs", 2, "--prove")

MICRO_BATCH_LOST = """
cat = lesson.torch.cat
lesson.torch.cat = lambda outputs: cat([*outputs[:-1], outputs[-1].detach()])
"""
REPEATS_COUNT = """
def all_real(images, batch, rank, index, rows, device=None):
    return torch.ones(rows, dtype=torch.bool, device=device)

lesson.data.real_rows = all_real
"""
PRINTS_ITS_GPUS = """
gpus = lesson.multigpu.gpus

def asked(count, world):
    print(f"rank {world.rank} asks for {count}", flush=True)
    return gpus(count, world)

lesson.multigpu.gpus = asked
"""
CASES = ("slow, inside", "slow, across", "fast, inside", "fast, across")
FAULTS = {
    "no sum of gradients": SILENT_DDP,
    "a micro-batch is lost": MICRO_BATCH_LOST,
    "repeated images count": REPEATS_COUNT,
}


@pytest.mark.parametrize(
    ("ranks", "batch", "micro_batches"), [(1, 8, 2), (2, 8, 1), (2, 12, 3), (3, 12, 2)]
)
def test_replicas_of_stages_equal_one_process(tmp_path, npz, ranks, batch, micro_batches):
    """35 images: the last batch is uneven, and the sampler repeats some."""
    flags = ("--data", npz(), *FLAGS, "--batch-size", batch, "--spawn", ranks)
    more = ("--micro-batches", micro_batches, "--out", tmp_path / "o")
    done = run_script(SCRIPT, *flags, *more)
    assert done.returncode == 0, done.stdout
    assert "limit 1e-05: holds" in done.stdout
    assert done.stdout.count("This machine has no GPU") == 1
    assert "Warning" not in done.stdout
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert metrics["devices"] == 2 * ranks
    assert metrics["device"] == "vgpu"
    assert metrics["world_size"] == ranks
    saved = torch.load(tmp_path / "o" / "model.pt")
    assert all(weight.device.type == "cpu" for weight in saved.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    path = planted(tmp_path, "PT_CNN_HybridParallel", FAULTS[fault])
    more = ("--batch-size", 8, "--spawn", 2, "--out", tmp_path / "o")
    done = run_script(path, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 1, done.stdout
    assert "limit 1e-05: fails" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--spawn", 2, "--batch-size", 6), "over 2 ranks × 2 micro-batches"),
        (("--spawn", 2, "--micro-batches", 0), "from 1 up"),
        (("--spawn", 2, "--lr", "3e38"), "lower --lr"),
        (("--spawn", 2, "--data", "no.npz"), "no data file"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("error: ") == 1
    assert words in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.rglob("model.pt"))


def test_the_lesson_asks_for_its_ranks_own_gpus(tmp_path, npz):
    path = planted(tmp_path, "PT_CNN_HybridParallel", PRINTS_ITS_GPUS)
    flags = ("--data", npz(), "--epochs", 1, "--batch-size", 8)
    done = run_script(path, *flags, "--spawn", 2, "--out", tmp_path / "o")
    assert "rank 0 asks for 2" in done.stdout, done.stdout
    assert "rank 1 asks for 2" in done.stdout, done.stdout


STEPS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from experiments import layout_steps
from multigpu import launch

if __name__ == "__main__":
    inside, across = "stages inside nodes", "stages across nodes"
    cases = [(layout, net) for net in ("Ethernet10", "HDR200") for layout in (inside, across)]
    results = {
        "replicas": launch.call(layout_steps, 4, [("four replicas", "Ethernet10")]),
        "one": launch.call(layout_steps, 1, [("one pipeline, one node", "Ethernet10")]),
        "two by two": launch.call(layout_steps, 2, cases),
    }
    print(json.dumps(results))
"""


@pytest.mark.slow
def test_a_case_that_needs_stages_and_replicas(tmp_path):
    """Four replicas run out of memory, two pipelines fit, and the network decides."""
    program = tmp_path / "program.py"
    program.write_text(STEPS)
    folder = ROOT / "lessons" / "06-hybrid-parallel"
    results = json.loads(run_script(program, folder).stdout.splitlines()[-1])
    for (step,) in results["replicas"]:
        seconds, _, _, error = step
        assert seconds is None
        assert "vgpu out of memory" in error and "16.00 GiB" in error
    ((one,),) = results["one"]
    speeds = {}
    for rank in results["two by two"]:
        for case, step in zip(CASES, rank, strict=True):
            seconds, images, peak, error = step
            assert error == ""
            # More than half of a V100 on each GPU: neither stage is an empty one.
            assert all(8 < gib < 16 for gib in peak) and len(peak) == 2
            speeds[case] = images / seconds
    alone = one[1] / one[0]
    slow, slow_across, fast, fast_across = speeds.values()
    assert slow > 1.15 * slow_across
    assert fast > fast_across
    # The second node pays with HDR200 only.
    assert slow < alone < fast < 2 * alone


def test_both_lessons_have_the_same_halves():
    """Lessons 03 and 06 each define the class Halves: layers and devices are equal."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import PT_CNN_HybridParallel
    import PT_CNN_ModelParallel

    with vgpu.running(2) as (first, second):
        placements = []
        for halves in (
            PT_CNN_HybridParallel.Halves(first, second, 2),
            PT_CNN_ModelParallel.Halves(first, second),
        ):
            placement = [(n, p.device, p.shape) for n, p in halves.named_parameters()]
            placements.append(placement)
        assert placements[0] == placements[1]
