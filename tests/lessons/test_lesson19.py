"""Lesson 19: ring attention and experts by hand, their balance, torch's ring, the proof."""

import builtins
import json
import math
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import proofs
import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, run_script, torchrun
from torch import nn
from virtual_runs import virtual

from multigpu import launch, prove

PAGE = ROOT / "lessons" / "19-context-experts"
SCRIPT = ROOT / "scripts" / "PT_GPT_ContextExperts.py"
BY_EXPERTS = PAGE / "experts.py"


def changed(path: Path, right: str, wrong: str) -> SimpleNamespace:
    """The names of a program, with a text replaced."""
    text = path.read_text()
    assert text.count(right) == 1, right
    names = {"__name__": "changed", "__builtins__": builtins}
    exec(compile(text.replace(right, wrong), "changed", "exec"), names)
    return SimpleNamespace(**names)


def off(experiments, ranks: int, cases: list) -> list[float]:
    """For each (way, changed names): a weight's largest difference to the serial run's."""
    serial = dict(
        zip(
            ("serial", "experts"),
            experiments.train(["serial", "experts"], steps=3),
            strict=True,
        )
    )
    of_ranks = launch.call(each_case, ranks, experiments.train, cases)
    return [
        max(
            (own[number] - serial.get(way, serial["serial"])).abs().max().item()
            for own in of_ranks
        )
        for number, (way, _) in enumerate(cases)
    ]


def each_case(train, cases: list) -> list[torch.Tensor]:
    return [train([way], program, steps=3)[0] for way, program in cases]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_and_experts_compute_what_one_gpu_computes(experiments, ranks):
    cases = [(way, experiments.UNCHANGED) for way in ("plain", "zigzag", "experts")]
    assert max(off(experiments, ranks, cases)) < 1e-9


class OneByOne(nn.Module):
    """The mixture on one GPU without exchanges: token after token."""

    def __init__(self, experts):
        super().__init__()
        self.of = experts

    def forward(self, x):
        out, balance = torch.zeros_like(x), 0.0
        room = math.ceil(self.of.capacity * x.shape[1] / self.of.experts)
        for row, tokens in enumerate(x):
            taken = [0] * self.of.experts
            chances = self.of.router(tokens).softmax(-1)
            for place, token in enumerate(tokens):
                expert = chances[place].argmax().item()
                if taken[expert] < room:
                    up, down = self.of.up.to_local()[expert], self.of.down.to_local()[expert]
                    out[row, place] = chances[place, expert] * (F.gelu(token @ up) @ down)
                taken[expert] += 1
            shares = torch.tensor(taken, dtype=x.dtype) / len(tokens)
            balance += self.of.experts * (shares * chances.mean(0)).sum() / len(x)
        self.balance = balance
        return out


@pytest.mark.parametrize("capacity", [0.3, 1.25, 8.0])
def test_experts_are_what_a_loop_over_the_tokens_computes(experiments, capacity):
    with experiments.group("gloo") as world:
        torch.manual_seed(1)
        mesh = experiments.init_device_mesh("cpu", (world.size,))
        experts = experiments.experts.Experts(6, 4, capacity, mesh).double()
        x = torch.randn(3, 16, 6, dtype=torch.double)
        loop = OneByOne(experts)
        assert torch.allclose(experts(x), loop(x))
        assert torch.allclose(experts.balance, loop.balance)
        room = math.ceil(capacity * 16 / 4)
        chosen = F.one_hot(experts.router(x).argmax(-1), 4).sum(1)
        kept = chosen.clamp(max=room).sum() / chosen.sum()
        assert experts.dropped == pytest.approx(1 - kept.item())


REDUCED = """if not isinstance(weight, DTensor):  # an expert's has come from all ranks' tokens
            dist.all_reduce(weight.grad)"""
ALL_REDUCED = """if True:
            own = weight.grad.to_local() if isinstance(weight, DTensor) else weight.grad
            whole = own.contiguous()
            dist.all_reduce(whole)
            own.copy_(whole)"""
RING = {
    "kv, dkv = came(), send_on(dkv)()": "kv, dkv = came(), dkv",  # gradients stay
    "kv = came() if step": "kv = [came(), kv][1] if step",  # always its own keys
    "torch.logaddexp(lses[i], new.logsumexp(-1, True))": "new.logsumexp(-1, True)",
    "return [(i, j, own[i] == visitor[j])": "return [(i, j, False)",  # no mask
    "        dist.all_reduce(weight.grad)": "        pass",  # its own
}
EXPERTS = {
    "        dist.all_to_all_single(came, parts.contiguous())": "        came.copy_(parts)",
    "        return AllToAll.apply(gradient)": "        return gradient",
    REDUCED: ALL_REDUCED,
    "chosen.to(x).mean(1) * chances.mean(1)": (
        "chosen.to(x).mean((0, 1)) * chances.mean((0, 1))"  # of the rank's batch
    ),
}


def test_without_one_of_the_exchanges_the_weights_are_others(experiments):
    cases = [("zigzag", changed(SCRIPT, *fault)) for fault in RING.items()]
    cases += [("experts", changed(BY_EXPERTS, *fault)) for fault in EXPERTS.items()]
    assert min(off(experiments, 2, cases)) > 1e-7


def test_zigzag_gives_each_rank_as_much_work_in_each_step(experiments):
    script = experiments.script
    for ranks in (2, 4, 7):
        assert sorted(chain(*script.zigzag(ranks))) == list(range(2 * ranks))
        for step in range(ranks):
            of_ranks = [
                len(script.pairs(script.zigzag(ranks), rank, step)) for rank in range(ranks)
            ]
            assert set(of_ranks) == {3 if step == 0 else 2}
    plain = [len(script.pairs(experiments.plain(4), rank, 1)) for rank in range(4)]
    assert plain == [0, 1, 1, 1]


@pytest.mark.slow
def test_torchs_ring_is_right_on_virtual_gpus_and_faster(experiments):
    assert max(launch.call(experiments.off_with_torch, 2)) < 1e-5
    cases = [(way, 8192) for way in ("plain", "zigzag", "torch")]
    plain, zigzag, torchs = launch.call(experiments.steps, 4, cases)[0]
    assert torchs.seconds < zigzag.seconds < plain.seconds
    assert plain.timeline.busy(0) < 0.7 < 0.8 < zigzag.timeline.busy(0)


# ---- the script -----------------------------------------------------------------------------


PROGRAMS = pytest.mark.parametrize("program", [SCRIPT, BY_EXPERTS], ids=lambda path: path.stem)


def proof(tmp_path: Path, data: Path, program: Path, **fault: str) -> prove.Proof:
    return proofs.proof(program, tmp_path, "--data", data, "--batch-size", 8, **fault)


@pytest.mark.slow
@PROGRAMS
def test_two_ranks_equal_one(in_forks, tmp_path, few_digits, program):
    found = proof(tmp_path, few_digits(), program)
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_with_the_experts_gradients_reduced_the_proof_fails(in_forks, tmp_path, few_digits):
    found = proof(tmp_path, few_digits(), BY_EXPERTS, right=REDUCED, wrong=ALL_REDUCED)
    assert found.verdict == "fails", str(found)


def test_two_ranks_save_the_whole_model(tmp_path, few_digits):
    flags = ("--data", few_digits(), "--batch-size", 8, "--epochs", 1)
    runs = {
        "one": run_script(BY_EXPERTS, *flags, "--out", tmp_path / "one"),
        "two": torchrun(2, BY_EXPERTS, *flags, "--out", tmp_path / "two"),
    }
    losses, models = {}, {}
    for name, done in runs.items():
        assert done.returncode == 0, done.stdout
        losses[name] = json.loads((tmp_path / name / "metrics.json").read_text())["loss"]
        models[name] = torch.load(tmp_path / name / "model.pt")
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4)
    for weight, whole in models["one"].items():
        found = models["two"][weight]
        assert type(found) is torch.Tensor
        assert (found - whole).abs().median() < 1e-6, weight


@pytest.mark.slow
@PROGRAMS
def test_it_runs_on_virtual_gpus(tmp_path, few_digits, program):
    launcher = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    flags = ("--data", few_digits(), "--batch-size", 8, "--epochs", 1)
    done = virtual(tmp_path, "--gpus", 2, *launcher, program, *flags, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stdout
    assert "epoch 1: loss" in done.stdout
