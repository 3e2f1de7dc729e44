"""Lesson 17: a mesh of stages, FSDP and tensor parallelism equals one process."""

import functools
import json
import math
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commands import ROOT, run_script, torchrun
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import RowwiseParallel
from virtual_runs import virtual

from multigpu import launch, prove

PAGE = ROOT / "lessons" / "17-mesh"
SCRIPT = ROOT / "scripts" / "PT_GPT_Mesh.py"


@pytest.fixture(scope="module")
def one():
    """The weights of one process after three steps."""
    return joined(launch.call(_meshes, 1, str(PAGE), {"one": ((1, 1, 1, 1), "")}))["one"]


def joined(of_ranks: list[dict]) -> dict[str, dict[str, torch.Tensor]]:
    """For each name the weights of all stages."""
    return {
        name: functools.reduce(lambda a, b: a | b, [found[name] for found in of_ranks])
        for name in of_ranks[0]
    }


def _meshes(page: str, cases: dict[str, tuple[tuple[int, ...], str]]) -> dict:
    """In a rank: for each name the weights after steps on a mesh, with a fault or ""."""
    sys.path.insert(0, page)
    import experiments

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, (shape, fault) in cases.items():
        program = changed(*CHANGES[fault]) if fault in CHANGES else experiments.UNCHANGED
        with ExitStack() as stack:
            for patch in FAULTS[fault]() if fault in FAULTS else ():
                stack.enter_context(patch)
            found[name] = experiments.make_steps(shape, program)
    dist.destroy_process_group()
    return found


# ---- each synchronization is needed ---------------------------------------------------------


def no_sum_after_row_linears():
    def parts_alone(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs.to_local()

    return [mock.patch.object(RowwiseParallel, "_prepare_output_fn", parts_alone)]


def no_reduce_scatter():
    def own_part(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

    return [mock.patch.object(DefaultReduceScatter, "__call__", own_part)]


def no_all_gather():
    def own_part(self, output_tensor, input_tensor, group, async_op=False):
        output_tensor.zero_().chunk(group.size())[group.rank()].copy_(input_tensor)

    return [mock.patch.object(DefaultAllGather, "__call__", own_part)]


def zeros_instead_of(name: str):
    """A stage sends zeros instead of its outputs, or of its inputs' gradients."""
    original = getattr(PipelineStage, name)

    def send(self, chunk):
        operations = original(self, chunk)
        for one in operations:
            one.tensor = torch.zeros_like(one.tensor)
        return operations

    return lambda: [mock.patch.object(PipelineStage, name, send)]


def no_mean_over_copies():
    return [mock.patch.object(dist, "all_reduce", lambda *args, **options: None)]


FAULTS = {
    "no sum after row linears": no_sum_after_row_linears,
    "no reduce-scatter of FSDP": no_reduce_scatter,
    "no all-gather of FSDP": no_all_gather,
    "stages send no outputs": zeros_instead_of("get_fwd_send_ops"),
    "stages send no gradients": zeros_instead_of("get_bwd_send_ops"),
    "copies do not average": no_mean_over_copies,
}
# In functions that a reader edits in the notebook, and gives to the steps as `program`.
CHANGES = {
    "stages in the wrong order": (
        "index * each : (index + 1) * each",
        "(1 - index) * each : (2 - index) * each",
    ),
    "a lost micro-batch": (
        "(tokens[:, :-1],)",
        "(tokens[: len(tokens) // 2, :-1].repeat(2, 1),)",
    ),
    "blocks are not shared": ("fully_shard(module, **options)", "pass"),
}


def changed(right: str, wrong: str) -> SimpleNamespace:
    """The functions of the notebook's program, with a text replaced."""
    text = SCRIPT.read_text()
    assert text.count(right) == 1, right
    names = {"__name__": "changed"}
    exec(compile(text.replace(right, wrong), "changed", "exec"), names)
    return SimpleNamespace(
        **{name: names[name] for name in ("keep_stage", "divide", "train_step")}
    )


RIGHT = {
    "stages and tensor": ((2, 1, 1, 2), ""),
    "shards and tensor": ((1, 1, 2, 2), ""),
    "copies and shards": ((1, 2, 2, 1), ""),
    "stages and shards": ((2, 1, 2, 1), ""),
}
WRONG = {
    "no sum after row linears": ((1, 1, 2, 2), "no sum after row linears"),
    "no reduce-scatter of FSDP": ((2, 1, 2, 1), "no reduce-scatter of FSDP"),
    "no all-gather of FSDP": ((2, 1, 2, 1), "no all-gather of FSDP"),
    "stages send no outputs": ((2, 1, 2, 1), "stages send no outputs"),
    "stages send no gradients": ((2, 1, 2, 1), "stages send no gradients"),
    "copies do not average": ((1, 2, 2, 1), "copies do not average"),
    "stages in the wrong order": ((2, 1, 2, 1), "stages in the wrong order"),
    "a lost micro-batch": ((2, 1, 2, 1), "a lost micro-batch"),
    "blocks are not shared": ((1, 1, 2, 2), "blocks are not shared"),
}


@pytest.fixture(scope="module")
def of_four():
    """The weights of four ranks: RIGHT meshes, then WRONG ones."""
    return joined(launch.call(_meshes, 4, str(PAGE), RIGHT | WRONG))


@pytest.mark.parametrize("name", RIGHT)
def test_four_ranks_on_a_mesh_equal_one_process(experiments, one, of_four, name):
    assert experiments.apart(of_four[name], one) < 1e-9


@pytest.mark.parametrize("name", WRONG)
def test_without_a_synchronization_weights_are_wrong(experiments, one, of_four, name):
    assert not experiments.apart(of_four[name], one) < 1e-4


@pytest.mark.slow
def test_eight_ranks_in_all_dimensions_equal_one_process_and_their_checkpoint_fits_two(
    experiments, one, tmp_path
):
    folder = str(tmp_path / "checkpoint")
    eight = experiments.trained((2, 1, 2, 2), save=folder, at=2)
    assert experiments.apart(eight, one) < 1e-9
    two = experiments.trained((1, 1, 1, 2), steps=(2, 3), load=folder)
    assert experiments.apart(two, one) < 1e-9


# ---- groups, layouts ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 1, 2, 2), (3, 2, 1, 4)])
def test_a_rank_talks_to_those_on_its_lines(experiments, shape):
    sizes = dict(zip(experiments.script.DIMENSIONS, shape, strict=True))
    for rank in range(math.prod(shape)):
        groups = experiments.groups_of_torch(shape, rank)
        partners = experiments._partners(sizes, rank)
        for name, members in groups.items():
            others = {other for other, line in partners.items() if line == name}
            assert others == {*members} - {rank}


@pytest.mark.long
@pytest.mark.slow
def test_a_stored_prediction_is_what_the_command_gives(experiments, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stored = experiments.find(64, 1, 1, 64, 1)
    found = experiments.predict(64, (1, 1, 64, 1), stored["batch"], stored["micro_batch"])
    assert found["seconds"] == pytest.approx(stored["seconds"], rel=1e-6)
    assert found["gib"] == pytest.approx(stored["gib"])


def test_the_formula_of_memory_is_near_the_meter(experiments):
    for row in experiments.stored()["layouts"]:
        if row["seconds"] and row["gpus"] == 64:
            formula = experiments.needs(row["mesh"], row["micro_batch"])
            assert formula == pytest.approx(row["gib"], rel=0.2), row


def test_the_rule_takes_more_dimensions_for_less_memory(experiments):
    assert experiments.choose(64, 200) == (1, 64, 1, 1)
    assert experiments.choose(64, 79) == (1, 8, 8, 1)
    stages, copies, shards, tensor = experiments.choose(64, 10)
    assert tensor == 8 and stages > 1 and stages * copies * shards * tensor == 64


# ---- the script -----------------------------------------------------------------------------


def test_four_ranks_save_the_whole_model(tmp_path, npz):
    flags = ("--data", npz(), "--batch-size", 16, "--micro-batches", 2, "--epochs", 1)
    runs = {
        "one": run_script(SCRIPT, *flags, "--out", tmp_path / "one"),
        "four": torchrun(4, SCRIPT, *flags, "--mesh", 2, 1, 2, 1, "--out", tmp_path / "four"),
    }
    losses, models = {}, {}
    for name, done in runs.items():
        assert done.returncode == 0 and done.stdout.count("epoch 1: loss") == 1, done.stdout
        losses[name] = json.loads((tmp_path / name / "metrics.json").read_text())["loss"]
        models[name] = torch.load(tmp_path / name / "model.pt")
    assert losses["four"] == pytest.approx(losses["one"], abs=1e-4)
    assert models["four"].keys() == models["one"].keys()
    for name, weight in models["one"].items():
        found = models["four"][name]
        assert type(found) is torch.Tensor
        # The gradient of k's bias is rounding alone, and AdamW makes whole steps of it.
        assert (found - weight).abs().max() < 5e-2, name


@pytest.mark.long
@pytest.mark.slow
def test_the_proof_holds_on_eight_virtual_gpus(tmp_path, npz):
    flags = f"--data {npz()} --out {tmp_path / 'o'}"
    report = prove.run(
        f"torchrun --nproc-per-node=8 {SCRIPT} --mesh 2 1 2 2 {flags}",
        steps=2,
        reference=f"{sys.executable} {SCRIPT} {flags}",
    )
    assert report.verdict == "holds", report.line


@pytest.mark.slow
def test_the_script_runs_on_virtual_gpus(tmp_path, npz):
    flags = ("--mesh", 2, 1, 1, 2, "--data", npz(), "--epochs", 1, "--out", "o")
    launcher = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=4")
    done = virtual(tmp_path, "--gpus", 4, *launcher, SCRIPT, *flags)
    assert done.returncode == 0 and "epoch 1: loss" in done.stdout, done.stdout
