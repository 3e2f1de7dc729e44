"""Lesson 10: each strategy sends what its formula says, the exact ones learn what one process learns, the others stay near."""

import json
import re

import pytest
from commands import ROOT, planted, run

from multigpu.errors import UserError
from multigpu.strategies import ALGORITHMS
from multigpu.strategies.costs import by_name

SCRIPT = ROOT / "scripts" / "PTL_Strategies.py"
NODES = ROOT / "scripts" / "PTL_NodeBatch.py"
EXACT = ("dp", "pipeline", "ddp_spawn", "ddp", "horovod", "bagua:gradient_allreduce", "ddp2")
APART = ("bagua:decentralized", "bagua:low_precision_decentralized", "bagua:async")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """All strategies on two ranks, on the digits: what it printed, and metrics.json."""
    out = tmp_path_factory.mktemp("all")
    done = run("python", SCRIPT, "--epochs", 2, "--prove", "--out", out)
    assert done.returncode == 0, done.stdout
    assert {path.name for path in out.iterdir()} == {
        "bytes.png",
        "spread.png",
        "link.png",
        "metrics.json",
    }
    return done.stdout, json.loads((out / "metrics.json").read_text())


def test_all_twelve_run_and_the_proof_holds(whole):
    text, told = whole
    assert (
        set(told["strategies"]) == {*EXACT, *(f"bagua:{name}" for name in ALGORITHMS)}
        and len(told["strategies"]) == 12
    )
    assert "limit 1e-05: holds" in text and "Warning" not in text and told["proof"]["holds"]
    assert all(name in told["proof"]["what"] for name in EXACT)


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
    qadam = whole[1]["strategies"]["bagua:qadam"]["bytes_each"]
    assert qadam[9] == pytest.approx(ring, rel=0.02) and qadam[10] == pytest.approx(
        in_bytes, rel=0.02
    ), "ten to warm up"


def test_who_is_exact_and_whose_ranks_are_apart(whole):
    for name, row in whole[1]["strategies"].items():
        assert (row["from_serial"] <= 1e-5) == (name in EXACT), name
        assert (max(row["spread"]) > 1e-6) == (name in APART), name
        assert max(row["spread"]) < 1 and row["test_accuracy"] > 0.8, name
        assert len(row["losses"]) == 2 and row["losses"][1] < row["losses"][0], name
    assert whole[1]["strategies"]["bagua:async"]["syncs"] > 0
    losses = {round(whole[1]["strategies"][name]["loss"], 5) for name in EXACT}
    assert len(losses) == 1, "the loss is over all images, each once"


def test_four_ranks_and_one_peer_each(tmp_path, npz):
    flags = (
        "--data",
        npz(),
        "--epochs",
        3,
        "--batch-size",
        8,
        "--ranks",
        4,
        "--out",
        tmp_path / "o",
    )
    done = run("python", SCRIPT, "--strategy", "bagua:decentralized:shift_one", *flags)
    assert done.returncode == 0, done.stdout
    told = json.loads((tmp_path / "o" / "metrics.json").read_text())
    (row,) = told["strategies"].values()
    weights = row["bytes_predicted"] / 4
    assert (
        row["bytes_counted"] == pytest.approx(4 * weights, rel=0.02)
        and max(row["spread"]) > 1e-6
    )
    assert told["proof"] is None and told["devices"] == 4


def test_without_the_averaging_the_proof_fails(tmp_path, npz):
    fault = """
import multigpu.strategies.ddp as where
class Silent(where.DistributedDataParallel):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.require_backward_grad_sync = False

where.DistributedDataParallel = Silent
"""
    flags = (
        "--data",
        npz(),
        "--epochs",
        2,
        "--batch-size",
        8,
        "--prove",
        "--out",
        tmp_path / "o",
    )
    done = run(
        "python", planted(tmp_path, "PTL_Strategies", fault), "--strategy", "ddp", *flags
    )
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
        by_name(name)


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
    done = run("python", SCRIPT, "--data", npz(), "--epochs", 1, *flags, "--out", out)
    assert (
        done.returncode == 2 and done.stdout.count("error: ") == 1 and words in done.stdout
    ), done.stdout
    assert "Traceback" not in done.stdout and not (out / "metrics.json").exists()


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (1, 3)])
def test_ddp2_learns_from_the_nodes_batches(tmp_path, npz, nodes, each):
    flags = (
        "--data",
        npz(),
        "--epochs",
        2,
        "--batch-size",
        12,
        "--nodes",
        nodes,
        "--each",
        each,
        "--prove",
    )
    done = run("python", NODES, *flags, "--out", tmp_path / "o")
    assert done.returncode == 0 and "limit 1e-05: holds" in done.stdout, done.stdout
    told = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert (told["devices"], told["world_size"]) == (nodes * each, nodes)


def test_a_loss_of_the_pieces_is_found_out(tmp_path, npz):
    """The rows of one device alone, as ddp would have them."""
    fault = (
        "import types\nold = lesson.serial\nkept = dict(lesson.__dict__)\n"
        "lesson.serial = types.FunctionType(old.__code__, kept, 'serial', old.__defaults__)\n"
        "nce = lesson.nce\nlesson.nce = lambda a, b: (nce(a[::2], b[::2]) + nce(a[1::2], b[1::2])) / 2\n"
    )
    flags = (
        "--data",
        npz(),
        "--epochs",
        2,
        "--batch-size",
        8,
        "--prove",
        "--out",
        tmp_path / "o",
    )
    done = run("python", planted(tmp_path, "PTL_NodeBatch", fault), *flags)
    assert done.returncode == 1 and "limit 1e-05: fails" in done.stdout, done.stdout


def test_a_batch_that_cannot_be_filled(tmp_path, npz):
    done = run("python", NODES, "--data", npz(), "--batch-size", 40, "--out", tmp_path / "o")
    assert done.returncode == 2 and "35 training images fill no batch of 40" in done.stdout, (
        done.stdout
    )
