"""Lesson 10: each strategy sends its formula's bytes; the exact ones equal one process."""

import json
import re
import sys

import cloudpickle
import pytest
import torch
from commands import ROOT, planted, run_script
from nccl_programs import results

from multigpu import launch, vgpu
from multigpu.comparison import EXACT, NAMES, consensus_picture, strategy_for_short_run
from multigpu.errors import UserError
from multigpu.strategies import ALGORITHMS
from multigpu.strategies.costs import predicted_bytes
from multigpu.vgpu.sim.presets import Link

sys.path.insert(0, str(ROOT / "scripts"))
import PTL_Compressed as compressed
import PTL_Decentralized as decentralized
import PTL_Strategies as exact

SCRIPT = ROOT / "scripts" / "PTL_Strategies.py"
COMPRESSED = ROOT / "scripts" / "PTL_Compressed.py"
DECENTRALIZED = ROOT / "scripts" / "PTL_Decentralized.py"
# The ranks cannot import a script by its name.
cloudpickle.register_pickle_by_value(exact)

APART = ("bagua:decentralized", "bagua:low_precision_decentralized", "bagua:async")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """All strategies on two ranks, on the digits: what it printed, and metrics.json."""
    out = tmp_path_factory.mktemp("all")
    done = run_script(SCRIPT, "--strategy", "all", "--epochs", 2, "--prove", "--out", out)
    assert done.returncode == 0, done.stdout
    assert {path.name for path in out.iterdir()} == {
        "bytes.png",
        "consensus.png",
        "link.png",
        "metrics.json",
    }
    return done.stdout, json.loads((out / "metrics.json").read_text())


def test_all_twelve_run_and_the_proof_holds(whole):
    text, metrics = whole
    strategies = metrics["strategies"]
    assert set(strategies) == {*EXACT, *(f"bagua:{name}" for name in ALGORITHMS)}
    assert len(strategies) == 12
    assert "limit 1e-05: holds" in text and "Warning" not in text
    assert metrics["proof"]["holds"]
    (compared,) = re.findall("compared with serial: (.*)", text)
    assert sorted(compared.split(", ")) == sorted(EXACT)
    assert max(map(len, text[: text.index("figures: ")].splitlines())) <= 95


def test_bytes_are_those_of_the_formulas(whole):
    n = 38_282
    ring, in_bytes = 4 * n, 2 * (n // 2 + 8)
    formulas = dict.fromkeys(whole[1]["strategies"], ring) | {
        "bagua:bytegrad": in_bytes,
        "bagua:qadam": in_bytes,
    }
    formulas["bagua:low_precision_decentralized"] = 2 * (n + 8)
    for name, row in whole[1]["strategies"].items():
        if name in ("dp", "pipeline"):
            assert row["bytes_counted"] == row["bytes_predicted"] == 0
            continue
        assert row["bytes_predicted"] == formulas[name]
        headers = 8 * 576 if name == "horovod" else 0  # a message for each parameter
        assert row["bytes_counted"] - headers == pytest.approx(formulas[name], rel=0.02), name
        assert row["link_seconds_predicted"] == pytest.approx(formulas[name] * 8 / 100e6)
    qadam = whole[1]["strategies"]["bagua:qadam"]["bytes_by_step"]
    assert qadam[9] == pytest.approx(ring, rel=0.02) and qadam[10] == pytest.approx(
        in_bytes, rel=0.02
    ), "ten steps of warm-up"


def test_who_is_exact_and_whose_ranks_are_apart(whole):
    for name, row in whole[1]["strategies"].items():
        assert (row["difference_from_serial"] <= 1e-5) == (name in EXACT), name
        assert (max(row["consensus_distance"]) > 1e-6) == (name in APART), name
        assert row["test_accuracy"] > 0.8, name
        # How often async averages depends on what else the machine does, and so how far apart
        # its ranks get.
        assert name == "bagua:async" or max(row["consensus_distance"]) < 1, name
        assert len(row["losses"]) == 2 and row["losses"][1] < row["losses"][0], name
    assert whole[1]["strategies"]["bagua:async"]["averaging_rounds"] > 0
    losses = {round(whole[1]["strategies"][name]["loss"], 5) for name in EXACT}
    assert len(losses) == 1, "the loss is over all images, each once"


def test_qadam_is_near_qadam_in_one_process_and_far_from_adam(whole):
    """The frozen variance separates it from Adam; the bytes make a smaller difference."""
    row = whole[1]["strategies"]["bagua:qadam"]
    assert 0 < row["difference_from_serial"] < 0.5 * row["difference_from_adam"]
    assert "QAdam in one process" in whole[0]


def test_the_consensus_distance_has_its_steps_and_the_weights_norm(whole):
    steps = 2 * 23  # two epochs of 1,437 images, 64 per step
    for name, row in whole[1]["strategies"].items():
        # At the end the ranks of async wait, and their weights become equal.
        end = [] if name == "bagua:async" else [steps]
        assert row["consensus_steps"] == [*range(1, steps, 5), *end]
        assert len(row["weights_norm"]) == len(row["consensus_distance"])
        assert min(row["weights_norm"]) > max(row["consensus_distance"])


def test_the_consensus_picture_has_the_norm_and_the_last_step(whole):
    axes = consensus_picture(whole[1]["strategies"]).axes[0]
    lines = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    assert set(lines) == {*APART, "norm of the weights"}
    ends = {name: 41 if name == "bagua:async" else 46 for name in lines}
    assert {name: xs[-1] for name, xs in lines.items()} == ends


def test_async_ranks_are_apart_while_they_train(whole):
    """The distance that the table shows is none after the last step, when the ranks wait."""
    row = whole[1]["strategies"]["bagua:async"]
    assert row["consensus_distance"][-1] > 1e-6


def test_the_ring_by_hand_sends_what_gloo_sends():
    for ranks, share in ((2, 1), (4, 3 / 2)):
        for by_hand, by_gloo, equal in launch.call(exact.count_ring, ranks, 3840):
            assert equal
            assert by_hand == pytest.approx(4 * 3840 * share, rel=0.06)
            assert by_gloo == pytest.approx(4 * 3840 * share, rel=0.12)


RINGS = {
    "script": "sys.path.insert(0, 'ROOT/scripts')\nfrom PTL_Strategies import ring",
    "solution": """
text = open('ROOT/lessons/10-strategies/solution.py').read()
text = text[text.index("def ring_allreduce") :]
exec(text[: text.index("### END SOLUTION")])
ring = ring_allreduce
""",
}


@pytest.mark.parametrize("where", RINGS)
def test_the_ring_does_not_stand_still_with_nccl(tmp_path, where):
    """A first isend to each pair waits for its receive: three ranks wait in a circle."""
    program = f"""
{RINGS[where].replace("ROOT", str(ROOT))}
start()
print(json.dumps(ring(full(rank + 1, 6)).tolist()))
"""
    assert results(tmp_path, program, size=3) == [[6.0] * 6] * 3


def test_a_ring_that_mixes_up_its_chunks_differs_from_gloo():
    right = exact.ring

    def mixed(vector):
        return torch.cat(right(vector).chunk(2)[::-1])

    def compared(numbers):
        exact.count_ring.__globals__["ring"] = mixed
        return exact.count_ring(numbers)

    assert not any(equal for *_, equal in launch.call(compared, 2, 3840))


def test_bytes_by_hand_are_half_an_interval_off_at_most():
    numbers = torch.linspace(-2, 5, 1001)
    levels, low, high = compressed.to_bytes(numbers)
    restored = compressed.to_numbers(levels, low, high)
    assert levels.dtype == torch.uint8 and levels.min() == 0 and levels.max() == 255
    assert 0.9 * 7 / 510 < (restored - numbers).abs().max() <= 7 / 510 + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("gbit", "winner"), [(25, "bagua:bytegrad"), (50, "ddp")])
def test_which_strategy_wins_on_a_simulated_link(gbit, winner, monkeypatch):
    """The end of the second sitting says from which link on ddp is faster than bytegrad."""
    monkeypatch.syspath_prepend(ROOT / "lessons" / "10-strategies")
    monkeypatch.delitem(sys.modules, "picture", raising=False)
    import picture

    monkeypatch.delitem(sys.modules, "picture")
    link = Link("a link", bandwidth=gbit * 1.25e8, latency=30e-6)
    seconds = {}
    for name in ("ddp", "bagua:bytegrad"):
        step = vgpu.Timeline.of_ranks(launch.call(picture.one_step, 2, name, link))
        seconds[name] = step.end - step.start
    assert min(seconds, key=seconds.get) == winner


def test_exchanges_by_hand_end_at_the_mean():
    weights = decentralized.exchange([0, 1, 2, 3], 0)
    assert weights == [1, 2, 1, 2]
    assert decentralized.exchange(weights, 1) == [1.5] * 4


@pytest.mark.parametrize("script", [COMPRESSED, DECENTRALIZED])
def test_a_sitting_trains_with_its_own_strategies(tmp_path, npz, script):
    flags = ("--data", npz(), "--epochs", 1, "--batch-size", 8, "--prove")
    done = run_script(script, *flags, "--out", tmp_path / "o")
    assert done.returncode == 0 and "proof: ddp equals one process" in done.stdout, done.stdout
    names = {COMPRESSED: compressed, DECENTRALIZED: decentralized}[script].NAMES
    assert (
        tuple(json.loads((tmp_path / "o" / "metrics.json").read_text())["strategies"]) == names
    )


def test_shift_one_sends_less_than_an_all_reduce_from_four_ranks_on():
    def ratio(ranks):
        one = predicted_bytes("bagua:decentralized:shift_one", 1000, ranks)
        return one / predicted_bytes("ddp", 1000, ranks)

    assert ratio(2) == 1 and ratio(4) == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="3 is odd"):
        ratio(3)


def test_four_ranks_and_one_peer_each(tmp_path, npz):
    settings = ("--data", npz(), "--epochs", 3, "--batch-size", 8)
    flags = (*settings, "--ranks", 4, "--out", tmp_path / "o")
    done = run_script(SCRIPT, "--strategy", "bagua:decentralized:shift_one", *flags)
    assert done.returncode == 0, done.stdout
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    (row,) = metrics["strategies"].values()
    weights = row["bytes_predicted"] / 4
    assert (
        row["bytes_counted"] == pytest.approx(4 * weights, rel=0.02)
        and max(row["consensus_distance"]) > 1e-6
    )
    assert metrics["proof"] is None and metrics["devices"] == 4


def test_without_the_averaging_the_proof_fails(tmp_path, npz):
    fault = """
import multigpu.strategies.ddp as ddp

class Silent(ddp.DistributedDataParallel):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.require_backward_grad_sync = False

ddp.DistributedDataParallel = Silent
"""
    settings = ("--data", npz(), "--epochs", 2, "--batch-size", 8)
    flags = (*settings, "--prove", "--out", tmp_path / "o")
    path = planted(tmp_path, "PTL_Strategies", fault)
    done = run_script(path, "--strategy", "ddp", *flags)
    assert done.returncode == 1 and "limit 1e-05: fails" in done.stdout, done.stdout


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
        strategy_for_short_run(name)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--strategy", "ddp", "dpp"), "there is no strategy 'dpp'"),
        (("--strategy", "bagua:decentralized:shift_one", "--ranks", 3), "3 is odd"),
        (("--strategy", "dp", "--measure-link"), "none of these strategies"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, npz, flags, words):
    out = tmp_path / "out"
    done = run_script(SCRIPT, "--data", npz(), "--epochs", 1, *flags, "--out", out)
    assert (
        done.returncode == 2 and done.stdout.count("error: ") == 1 and words in done.stdout
    ), done.stdout
    assert "Traceback" not in done.stdout and not (out / "metrics.json").exists()


def test_the_link_is_measured_with_the_same_model_and_data(tmp_path, npz, monkeypatch):
    """The shape of the images decides the number of weights, so the bytes and the time."""
    measured = []
    monkeypatch.setattr(
        sys.modules["multigpu.comparison.run"],
        "measure_link",
        lambda rows, script, names, flags, megabits: measured.append(list(map(str, flags))),
    )
    settings = ("--data", npz(), "--epochs", 2, "--batch-size", 8, "--hidden", 16)
    flags = ("--strategy", "dp", "--measure-link", *settings, "--out", tmp_path / "o")
    exact.main(exact.parse([str(flag) for flag in flags]))
    again = compressed.parse(measured[0])
    assert again.data == str(npz()) and (again.hidden, again.batch_size) == (16, 8)


# ---- what today's Lightning has -------------------------------------------------------------


def test_lightning_has_ddp_and_ddp_spawn_of_the_twelve_names():
    """The page says so."""
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    names = {name.partition(":")[0] for name in NAMES}
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
