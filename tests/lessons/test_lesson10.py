"""Lesson 10: the exact strategies hold under proof, the others do not; what each sends."""

import importlib.util
import re
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from commands import ROOT, run_script, torchrun
from nccl_programs import results

from multigpu import launch, prove
from multigpu.errors import UserError
from multigpu.strategies import strategy_by_name
from multigpu.strategies.costs import predicted_bytes

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
picture = load("picture")
EXACT = experiments.STRATEGIES["PTL_Strategies"]
ALL = experiments.STRATEGIES.values()
APART = ("bagua:decentralized", "bagua:low_precision_decentralized", "bagua:async")


def from_notebook(stem: str, name: str) -> dict:
    """The names that the cell of a notebook's source defines which defines `name`."""
    cells = re.findall(r"```python\n(.*?)```", (PAGE / f"{stem}.md").read_text(), re.DOTALL)
    (cell,) = [cell for cell in cells if f"def {name}(" in cell]
    found = {"torch": torch, "dist": dist}
    exec(cell.partition("\nlesson.")[0], found)
    return found


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


@pytest.mark.slow
def test_two_ranks_compute_what_one_computes(in_forks, tmp_path, few_digits):
    """By the strategy horovod; tests/prove has the other exact ones."""
    found = proof(tmp_path, few_digits(), "PTL_Strategies", "horovod")
    assert found.verdict == "holds", str(found)


FAULTS = {
    "the mean over a rank's own images": (
        "ddp",
        "loss * shards / min(self.args.batch_size, total - index * self.args.batch_size)",
        "losses.mean()",
    ),
    "a learning rate that grows with the ranks": (
        "horovod",
        "scale_learning_rate=args.scale_lr",
        "scale_learning_rate=True",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(in_forks, tmp_path, few_digits, fault):
    strategy, *change = FAULTS[fault]
    found = proof(tmp_path, few_digits(), "PTL_Strategies", strategy, *change)
    assert found.verdict == "fails", str(found)
    assert ("lr is 0.1" in str(found)) == (strategy == "horovod"), str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "strategy"),
    [
        ("PTL_Compressed", "bagua:bytegrad"),
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


@pytest.mark.slow
def test_the_pictures_of_bytes_and_of_the_distance(rows):
    (axes,) = experiments.bytes_picture(rows).axes
    assert [bar.get_width() for bar in axes.patches] == [
        row["counted"] / 1000 for row in rows.values()
    ]
    axes = experiments.consensus_picture(rows).axes[0]
    ends = {line.get_label(): line.get_xdata()[-1] for line in axes.get_lines()}
    # At the end the ranks of async wait, and their weights become equal: it is left out.
    assert ends == dict.fromkeys(APART, 46) | {"bagua:async": 41, "norm of the weights": 46}


def test_shift_one_sends_less_than_an_all_reduce_from_four_ranks_on():
    def ratio(ranks):
        one = predicted_bytes("bagua:decentralized:shift_one", 1000, ranks)
        return one / predicted_bytes("ddp", 1000, ranks)

    assert ratio(2) == 1 and ratio(4) == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="3 is odd"):
        ratio(3)


# ---- by hand --------------------------------------------------------------------------------


def test_the_ring_by_hand_adds_up():
    ring = from_notebook("PTL_Strategies", "ring")["ring"]

    def both(numbers):
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        vector = torch.randn(numbers)
        total = ring(vector)
        dist.all_reduce(vector)
        return torch.allclose(total, vector, atol=1e-5)

    assert all(launch.call(both, 3, 3840))


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


def test_bytes_by_hand_are_half_an_interval_off_at_most():
    cell = from_notebook("PTL_Compressed", "to_bytes")
    numbers = torch.linspace(-2, 5, 1001)
    levels, low, high = cell["to_bytes"](numbers)
    restored = cell["to_numbers"](levels, low, high)
    assert levels.dtype == torch.uint8 and levels.min() == 0 and levels.max() == 255
    assert 0.9 * 7 / 510 < (restored - numbers).abs().max() <= 7 / 510 + 1e-6


# ---- statements of the notebooks ------------------------------------------------------------


@pytest.mark.slow
def test_which_strategy_wins_on_a_simulated_link(capsys):
    ddp, bytegrad = picture.print_steps(("ddp", "bagua:bytegrad"), (25, 50))
    assert bytegrad[0] < ddp[0] and ddp[1] < bytegrad[1]


@pytest.mark.slow
def test_a_longer_warm_up_brings_qadam_nearer_to_adam():
    adam, short, long = experiments.qadam_in_one_process((10, 50), epochs=5).values()
    assert short.largest > 3 * long.largest > 0 and adam.largest == 0


@pytest.mark.slow
def test_the_ranks_at_a_slow_link_measure_each_strategy(tmp_path):
    out = tmp_path / "seconds.json"
    names = ("ddp", "bagua:bytegrad")
    done = torchrun(2, PAGE / "experiments.py", out, 2, *names, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stdout
    times = {name: {"predicted": 1.0, "measured": 2.0} for name in names}
    assert "2000 ms" in experiments.link_picture(times).axes[0].get_title()
    assert all(f'"{name}"' in out.read_text() for name in names)


@pytest.mark.slow
def test_with_one_peer_each_a_rank_still_waits_for_the_slow_one():
    """Rank 0 meets rank 3 in every second step; rank 3 has paused 11 times before the last."""
    name = "bagua:decentralized:shift_one"
    ddp, one = experiments.one_slow_and_in_turn(("ddp", name), 12, 0.1).values()
    assert one[0].seconds >= 11 * 0.1
    for loop, each in ((ddp[0], 6), (one[0], 4)):  # bytes for each weight
        assert loop.bytes_per_step == pytest.approx(each * 38_282, rel=0.02)


@pytest.mark.slow
def test_in_async_the_fast_rank_does_not_wait_within_the_epoch():
    runs, in_turn, rounds = experiments.slow_rank(("ddp", "bagua:async"), 24, 12, 0.1)
    fast, slow = runs["ddp"]
    assert all(own[-1][2] > other[0][2] for own, other in zip(fast, slow, strict=True))
    fast, slow = runs["bagua:async"]
    assert fast[-1][-1][2] < slow[-1][0][1], "it has ended before the slow rank's last step"
    assert rounds["bagua:async"][-1] >= 3 and set(rounds["ddp"]) == {0}
    assert experiments.epoch_seconds(in_turn["ddp"]) > 12 * 0.1, "the pauses add up"
    assert len(experiments.slow_rank_picture(runs).axes) == 2


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


@pytest.mark.parametrize(
    ("stem", "flags", "words"),
    [
        ("PTL_Strategies", ("--strategy", "dpp"), "there is no strategy 'dpp'"),
        ("PTL_Strategies", ("--strategy", "dp", "--devices", 2), "multigpu virtual --gpus 2"),
        ("PTL_Compressed", ("--batch-size", 9, "--devices", 2), "a multiple of 2"),
        ("PTL_Decentralized", ("--data", "nowhere.npz"), "nowhere.npz"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, stem, flags, words):
    done = run_script(ROOT / "scripts" / f"{stem}.py", *flags, cwd=tmp_path)
    assert done.returncode != 0 and words in done.stdout, done.stdout
    assert done.stdout.count("\n") == 1, done.stdout


# ---- what today's Lightning has -------------------------------------------------------------


def test_lightning_has_ddp_and_ddp_spawn_of_the_twelve_names():
    """The page says so."""
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    names = {name.partition(":")[0] for names in ALL for name in names}
    available = strategies.StrategyRegistry.available_strategies()
    assert names & set(available) == {"ddp", "ddp_spawn"}


def test_lightning_refuses_ddp_spawn_in_a_notebook(monkeypatch):
    """The page says so."""
    lightning = pytest.importorskip("lightning.pytorch")
    connector = lightning.trainer.connectors.accelerator_connector
    monkeypatch.setattr(connector, "_IS_INTERACTIVE", True)
    settings = {"accelerator": "cpu", "devices": 2, "logger": False}
    with pytest.raises(lightning.utilities.exceptions.MisconfigurationException) as error:
        lightning.Trainer(strategy="ddp_spawn", **settings)
    assert "ddp_notebook" in str(error.value)
    lightning.Trainer(strategy="ddp_notebook", **settings)
