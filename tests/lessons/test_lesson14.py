"""Lesson 14: the GPT, checkpointing by hand and torch's, and the formula of memory."""

import json
import re

import pytest
import torch
from commands import ROOT, run
from virtual_runs import virtual, write

import multigpu
from multigpu.errors import UserError
from multigpu.memory import MODELS, Model, Step, Training, find_model, report

SCRIPT = ROOT / "scripts" / "PT_GPT_Memory.py"
PAGE = ROOT / "lessons" / "14-memory"
A100 = multigpu.GPUS["A100-80GB"]
SMALL = Model(layers=3, hidden=256, heads=4, tokens=256, vocabulary=1000)


def gradients(script, way: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All gradients of one batch, in one vector."""
    torch.manual_seed(0)
    model = script.GPT(2, 32, 4, 64, 27, "math", way)
    tokens = torch.randint(27, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, dtype is not None):
        loss = model(tokens).logsumexp(-1).mean()
    loss.backward()
    found = [torch.zeros(1) if one.grad is None else one.grad for one in model.parameters()]
    return torch.cat([one.flatten() for one in found])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("way", ["selective", "full", "hand"])
def test_checkpointing_gives_the_gradients_of_the_plain_model(experiments, way, dtype):
    plain = gradients(experiments.script, "none", dtype)
    assert (gradients(experiments.script, way, dtype) - plain).abs().max() < 1e-6


def test_without_computing_again_the_gradients_are_wrong(experiments, monkeypatch):
    """A backward that hands the gradient on, as if the block were the identity."""
    script = experiments.script
    plain = gradients(script, "none")
    backward = staticmethod(lambda ctx, gradient: (None, gradient))
    monkeypatch.setattr(script.Checkpoint, "backward", backward)
    broken = gradients(script, "hand")
    assert len(broken) < len(plain)  # the blocks' weights have no gradient
    words = slice(27 * 32)
    assert (broken[words] - plain[words]).abs().max() > 1e-5


def test_a_token_sees_none_after_it(experiments):
    script = experiments.script
    for attention in ("math", "flash"):
        block = script.Block(32, 4, attention)
        x = torch.randn(1, 16, 32)
        changed = x.clone()
        changed[:, 10:] += 1
        same = (block(x) - block(changed)).abs().amax((0, 2)) == 0
        assert same.tolist() == [True] * 10 + [False] * 6


CASES = [
    Training(2, "adamw", "fp32", "none", "flash"),
    Training(2, "sgd", "bf16-mixed", "selective", "math"),
    Training(8, "sgd", "fp32", "full", "math"),
    Training(8, "adamw", "bf16-mixed", "none", "math"),
]


@pytest.mark.parametrize(
    "training", CASES, ids=lambda case: " ".join(map(str, vars(case).values()))
)
def test_the_formula_is_within_2_percent_of_the_meter(experiments, training):
    """benchmarks/memory.py has models of 1.3 to 13 billion weights."""
    counted, _, _ = experiments.meter(SMALL, training)
    assert Step(SMALL, training, A100).peak()[1] / 2**30 == pytest.approx(counted, rel=0.02)


def test_the_report_says_what_fits_and_what_would():
    training = Training(4, attention="math")
    steps = [
        Step(MODELS["gpt-1.3b"], training, multigpu.GPUS[gpu])
        for gpu in ("A100-80GB", "V100-32GB")
    ]
    text = report.text(steps)
    assert "A100-80GB: fits" in text and "V100-32GB: does not fit" in text
    assert "fits with --attention flash --checkpointing full" in text
    large = report.text([Step(MODELS["gpt-7b"], Training(), A100)])
    assert "several GPUs must share them" in large
    # What the least settings need, or a smaller batch, or an optimizer without temporaries.
    many = Step(MODELS["gpt-1.3b"], Training(64, attention="flash"), A100)
    batch = int(report.remedy(many).split("--batch ")[1])
    for number, fits in ((batch, True), (batch + 1, False)):
        training = Training(number, attention="flash", checkpointing="full")
        assert (report.room(Step(many.model, training, A100)) >= 0) == fits
    between = Step(Model(40, 3072, 24), Training(1, attention="flash"), A100)
    assert "AdamW(fused=True)" in report.remedy(between)
    # The default allocator of a virtual A100 has no room for 35 (report.NEAR).
    for batch, is_near in ((35, True), (1, False)):
        step = Step(MODELS["gpt-1.3b"], Training(batch, checkpointing="full"), A100)
        assert ("expandable_segments" in report.verdict(step)) == is_near


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: find_model("gpt-9b"), "gpt-7b"),
        (lambda: Model(2, 100, 3), "divides 100"),
        (lambda: Model(0, 100, 2), "layers is 0"),
        (lambda: Training(0), "batch is 0"),
        (lambda: Training(1, "adam"), "adamw"),
        (lambda: Training(1, precision="fp16"), "bf16-mixed"),
    ],
)
def test_bad_input_is_one_sentence(make, words):
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_each_of_several_gpus_keeps_is_zeros_table(optimizer):
    step = Step(MODELS["gpt-7b"], Training(optimizer=optimizer), A100)
    rows = report.shared([step], 8).splitlines()[1:5]
    found = [float(re.split("  +", row)[-3]) for row in rows]
    state = 8 if optimizer == "adamw" else 4
    table = [8 + state, 8 + state / 8, 4 + (4 + state) / 8, (8 + state) / 8]
    assert found == pytest.approx(
        [MODELS["gpt-7b"].weights * each / 2**30 for each in table], abs=0.05
    )


SHARED = """
import gc, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
from PT_GPT_Memory import GPT, train_step

torch.cuda.set_device(0)
dist.init_process_group("nccl")
for stage in range(4):
    with torch.device("cuda:0"):
        model = GPT(4, 1024, 16, 512, 8192, "flash", "none")
        tokens = torch.randint(8192, (2, 513))
    if stage < 2:
        model = DistributedDataParallel(model, device_ids=[0])
    else:
        for module in (*model.blocks, model):
            fully_shard(module, reshard_after_forward=stage == 3)
    adamw = torch.optim.AdamW
    weights = model.parameters()
    steps = ZeroRedundancyOptimizer(weights, adamw) if stage == 1 else adamw(weights)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        train_step(model, steps, tokens)
    print("peak", torch.cuda.max_memory_allocated())
    del model, steps, weights, tokens
    gc.collect()
"""


@pytest.mark.long
def test_the_peak_with_several_gpus_is_that_of_virtual_ones(tmp_path):
    program = write(tmp_path, SHARED)
    done = virtual(tmp_path, "--world", 8, "--shapes-only", program, ROOT / "scripts")
    counted = [int(number) for number in re.findall(r"^peak (\d+)$", done.stdout, re.M)]
    step = Step(Model(4, 1024, 16, 512, 8192), Training(2), multigpu.GPUS["V100-16GB"])
    predicted = [step.shared_peak(8, stage) for stage in range(4)]
    assert predicted == pytest.approx(counted, rel=0.03), done.stdout


@pytest.mark.slow
def test_the_command_prints_what_several_gpus_share():
    gpus = "A100-80GB,RTX4090"
    done = run("multigpu", "memory", "--model", "1.3b", "--gpus", 4, "--gpu", gpus)
    assert done.returncode == 0 and "GiB on each of 4 GPUs" in done.stdout, done.stdout
    (row,) = re.findall("^ZeRO-1 .*", done.stdout, re.MULTILINE)
    fits = r"(\d+\.\d)  fits, (\d+\.\d) free  +(?:fits, \S+ free|does not fit, \S+ missing)$"
    peak, free = re.search(fits, row).groups()
    assert float(peak) + float(free) == pytest.approx(80 - 527 / 1024, abs=0.11)
    done = run("multigpu", "memory", "--model", "1.3b", "--gpus", 0)
    assert done.returncode == 2 and "give a number from 1 up" in done.stdout


@pytest.mark.slow
def test_the_command_asks_for_what_is_missing():
    done = run("multigpu", "memory", "--layers", 2)
    assert done.returncode == 2 and done.stdout.count("\n") == 1
    assert "--hidden, --heads missing" in done.stdout


@pytest.mark.slow
def test_the_script_trains_on_a_virtual_gpu_and_draws(tmp_path, npz):
    flags = ("--epochs", 1, "--layers", 1, "--checkpointing", "hand", "--out", "o")
    done = virtual(tmp_path, "--gpus", 1, SCRIPT, "--data", npz(), *flags)
    assert done.returncode == 0, done.stdout
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert f"loss {metrics['loss']:.4f}" in done.stdout
