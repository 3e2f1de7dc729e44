"""Lesson 16: tensor and sequence parallelism equal one process; each exchange is needed."""

import json
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commands import ROOT, run_script, torchrun
from virtual_runs import virtual

from multigpu import launch, prove

PAGE = ROOT / "lessons" / "16-tensor-parallel"
SCRIPT = ROOT / "scripts" / "PT_GPT_TensorParallel.py"
BY_HAND = PAGE / "tensor_parallel.py"


@pytest.fixture
def serial(experiments):
    """The gradients of one process, by name."""
    return experiments.gradients()


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_gradient_is_that_of_one_process(experiments, serial, ranks):
    ways = experiments.WAYS
    for found in launch.call(experiments._of_a_rank, ranks, ways):
        for way in ways:
            assert max(experiments.apart(found[way], serial).values()) < 1e-5, way


# ---- each exchange is needed ----------------------------------------------------------------


def no_sum(where: str):
    """Exchange.apply without the all-reduce "ahead" or "back"."""

    def change(by_hand):
        apply = by_hand.Exchange.apply

        def without(x, ahead, back):
            if where == "ahead":
                return apply(x, None if ahead is by_hand.add else ahead, back)
            return apply(x, ahead, None if back is by_hand.add else back)

        return mock.patch.object(by_hand.Exchange, "apply", without)

    return change


def instead(name: str, function):
    """The function `name` of tensor_parallel.py replaced."""
    return lambda by_hand: mock.patch.object(by_hand, name, function)


def only_own(x: torch.Tensor) -> torch.Tensor:
    """An all-gather in which the others send zeros."""
    rank = dist.get_rank()
    return torch.cat([x * (part == rank) for part in range(dist.get_world_size())], 1)


def own_part(x: torch.Tensor) -> torch.Tensor:
    """A reduce-scatter that adds up nothing."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def first_part(x: torch.Tensor) -> torch.Tensor:
    """The same tokens on all ranks."""
    return x.chunk(dist.get_world_size(), 1)[0].contiguous()


FAULTS = {
    "f adds up nothing": ("tensor", no_sum("back")),
    "g adds up nothing": ("tensor", no_sum("ahead")),
    "no all-gather": ("sequence", instead("gather", only_own)),
    "no reduce-scatter": ("sequence", instead("add_own", own_part)),
    "all ranks have the first tokens": ("sequence", instead("own", first_part)),
    "the norms' gradients are not added up": (
        "sequence",
        instead("add_gradients", lambda model: None),
    ),
}


def _with_faults(page: str) -> dict[str, dict[str, torch.Tensor]]:
    """In a rank: the gradients with each fault."""
    sys.path.insert(0, page)
    import experiments

    dist.init_process_group("gloo")
    found = {}
    for name, (way, change) in FAULTS.items():
        with change(experiments.tensor_parallel):  # where WAYS finds its functions
            found[name] = experiments.gradients(experiments.WAYS[way])
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def with_faults():
    return launch.call(_with_faults, 2, str(PAGE))


@pytest.mark.parametrize("fault", FAULTS)
def test_without_an_exchange_gradients_are_wrong(experiments, serial, with_faults, fault):
    assert max(experiments.apart(with_faults[0][fault], serial).values()) > 0.01


def test_the_missing_reduction_touches_norms_and_row_biases_alone(
    experiments, serial, with_faults
):
    found = with_faults[0]["the norms' gradients are not added up"]
    wrong = {name for name, far in experiments.apart(found, serial).items() if far > 0.01}
    assert wrong == {
        name for name in serial if "norm" in name or name.endswith(("out.bias", "down.bias"))
    }


# ---- the script ----------------------------------------------------------------------------


def test_the_script_saves_the_model_of_one_process(tmp_path, npz):
    flags = ("--data", npz(), "--epochs", 1, "--layers", 1, "--batch-size", 8)
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "one")
    assert done.returncode == 0, done.stdout
    expected = torch.load(tmp_path / "one" / "model.pt")
    loss = json.loads((tmp_path / "one" / "metrics.json").read_text())["loss"]
    for program in (SCRIPT, BY_HAND):
        out = tmp_path / program.stem
        done = torchrun(2, program, *flags, "--out", out)
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("epoch 1: loss") == 1, "rank 0 alone prints"
        found = torch.load(out / "model.pt")
        assert [*found] == [*expected]
        for name, weight in expected.items():
            # The gradient of k's bias is rounding alone, and AdamW makes whole steps of it.
            assert (found[name] - weight).abs().max() < 5e-2, name
        assert json.loads((out / "metrics.json").read_text())["loss"] == pytest.approx(
            loss, abs=1e-4
        )


@pytest.mark.slow
def test_two_ranks_equal_one(in_forks):
    found = prove.run(f"torchrun --nproc-per-node=2 {SCRIPT}", steps=2)
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_the_script_runs_on_virtual_gpus(tmp_path, npz):
    flags = ("--data", npz(), "--epochs", 1, "--layers", 1, "--out", "o")
    launcher = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    done = virtual(tmp_path, "--gpus", 2, *launcher, SCRIPT, *flags)
    assert done.returncode == 0 and "Warning" not in done.stdout, done.stdout
