"""Lesson 10: the exact strategies hold under proof, the others do not; what each sends."""

import importlib.util
import re
import sys

import cloudpickle
import pytest
from commands import ROOT
from nccl_programs import results

from multigpu import prove
from multigpu.errors import UserError
from multigpu.strategies import strategy_by_name

PAGE = ROOT / "lessons" / "10-strategies"


def load(name: str):
    """A module of the lesson's folder, by another name: other lessons have the same names."""
    spec = importlib.util.spec_from_file_location(f"lesson10_{name}", PAGE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # The ranks cannot import a module of this name.
    cloudpickle.register_pickle_by_value(module)
    return module


experiments = load("experiments")
EXACT = experiments.STRATEGIES["PTL_Strategies"]
ALL = experiments.STRATEGIES.values()
APART = ("bagua:decentralized", "bagua:low_precision_decentralized", "bagua:async")


# ---- proofs ---------------------------------------------------------------------------------


def proof(tmp_path, data, stem: str, strategy: str, right: str = "", wrong: str = ""):
    """Two ranks, one epoch and a step. 35 images in batches of 8: the last batch is uneven."""
    text = (ROOT / "scripts" / f"{stem}.py").read_text()
    assert right in text
    path = tmp_path / "proved.py"
    path.write_text(text.replace(right, wrong, 1))
    flags = ("--strategy", strategy, "--data", data, "--batch-size", 8)
    launcher = ["torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    return prove.run([*launcher, str(path), *map(str, flags)], steps=6, timeout=100)


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_compute_what_one_computes(in_forks, tmp_path, few_digits):
    """By the strategy horovod; tests/prove has the other exact ones."""
    found = proof(tmp_path, few_digits(), "PTL_Strategies", "horovod")
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_with_a_rate_that_grows_with_the_ranks_the_proof_fails(in_forks, tmp_path, few_digits):
    change = ("scale_learning_rate=args.scale_lr", "scale_learning_rate=True")
    found = proof(tmp_path, few_digits(), "PTL_Strategies", "horovod", *change)
    assert found.verdict == "fails", str(found)
    assert "lr is 0.1" in str(found), str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "strategy"),
    [
        pytest.param("PTL_Compressed", "bagua:bytegrad", marks=pytest.mark.long),
        ("PTL_Decentralized", "bagua:decentralized"),
    ],
)
def test_a_strategy_that_is_not_exact_does_not_hold(
    in_forks, tmp_path, few_digits, stem, strategy
):
    found = proof(tmp_path, few_digits(), stem, strategy)
    assert found.verdict == "fails", str(found)


# ---- all strategies side by side ------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    """All strategies on two ranks, two epochs of the digits."""
    found = {}
    for stem, names in experiments.STRATEGIES.items():
        new = [name for name in names if name not in found]
        found |= experiments.compare(stem, new, epochs=2)
    return found


@pytest.mark.slow
def test_who_is_exact_and_whose_ranks_are_apart(rows):
    assert len(rows) == 13  # twelve, and ddp with the hook of 16 bit
    for name, row in rows.items():
        assert (row["from_one"] <= experiments.LIMIT) == (name in EXACT), name
        assert (max(row["apart"]) > 1e-6) == (name in APART), name
        assert row["accuracy"] > 0.8, name
        if name in ("bagua:decentralized", "bagua:low_precision_decentralized"):
            assert experiments.farthest(row) < 0.02, name


@pytest.mark.slow
def test_bytes_are_those_of_the_formulas(rows):
    n = 38_282
    ring, in_bytes = 4 * n, 2 * (n // 2 + 8)
    formulas = dict.fromkeys(rows, ring) | dict.fromkeys(("dp", "pipeline"), 0)
    formulas |= dict.fromkeys(("bagua:bytegrad", "bagua:qadam"), in_bytes)
    formulas |= {"bagua:low_precision_decentralized": 2 * (n + 8), "ddp_fp16": ring / 2}
    for name, row in rows.items():
        assert row["predicted"] == formulas[name]
        headers = 8 * 576 if name == "horovod" else 0  # a message for each parameter
        assert row["counted"] - headers == pytest.approx(formulas[name], rel=0.02), name
    qadam = rows["bagua:qadam"]["by_step"]
    assert qadam[9] == pytest.approx(ring, rel=0.02), "ten steps of warm-up"
    assert qadam[10] == pytest.approx(in_bytes, rel=0.02)


# ---- by hand --------------------------------------------------------------------------------


RINGS = {
    "notebook": (PAGE / "PTL_Strategies.md", "def ring(", "```"),
    "solution": (PAGE / "solution.py", "def ring_allreduce", "### END SOLUTION"),
}


@pytest.mark.parametrize("where", RINGS)
def test_the_ring_does_not_stand_still_with_nccl(tmp_path, where):
    """A first isend to each pair waits for its receive: three ranks wait in a circle."""
    path, begin, end = RINGS[where]
    text = path.read_text()
    ring = text[text.index(begin) :].partition(end)[0].replace("ring_allreduce", "ring")
    program = f"""
{ring}
start()
print(json.dumps(ring(full(rank + 1, 6)).tolist()))
"""
    assert results(tmp_path, program, size=3) == [[6.0] * 6] * 3


# ---- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dpp", "there is no strategy 'dpp': did you mean"),
        ("bagua:bytegard", "did you mean 'bytegrad'"),
        ("bagua:decentralized:both", "peer_selection_mode 'both'"),
        ("ddp:x", "there is no strategy 'ddp:x': did you mean 'ddp'"),
        ("bagua:bytegrad:shift_one", "only decentralized has modes: give 'bagua:bytegrad'"),
    ],
)
def test_a_name_that_is_none(name, words):
    with pytest.raises(UserError, match=re.escape(words)):
        strategy_by_name(name)


# ---- what today's Lightning has -------------------------------------------------------------


def test_lightning_has_ddp_and_ddp_spawn_of_the_twelve_names():
    """The page says so."""
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    names = {name.partition(":")[0] for names in ALL for name in names}
    available = strategies.StrategyRegistry.available_strategies()
    assert names & set(available) == {"ddp", "ddp_spawn"}
