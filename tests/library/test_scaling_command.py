"""`multigpu scaling`: what it prints and writes, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from multigpu import Gpu
from multigpu.cli import app
from multigpu.errors import UserError
from multigpu.scaling import Loader, Measured, Prediction, predict, report

CNN = {"model": "cnn", "gpu": "V100-16GB", "link": "NVLink2"}
NODES = {**CNN, "between_nodes": "HDR200"}


def command(*flags: object):
    line = [str(flag) for flag in flags]
    return CliRunner().invoke(app, ["scaling", *line], catch_exceptions=True)


def test_a_prediction_for_1024_gpus(tmp_path):
    file = tmp_path / "numbers.json"
    flags = ("--model", "cnn:wide", "--gpu", "V100-16GB", "--link", "NVLink2")
    done = command(*flags, "--between-nodes", "HDR200", "--gpus-per-node", 4, "--json", file)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 95
    for words in ("weak scaling", "256 images", "4 per node", "linear", "bend", "simulated"):
        assert words in done.output, words
    written = json.loads(file.read_text())
    assert [row["gpus"] for row in written["rows"]] == [1, 8, 64, 1024]
    last = written["rows"][-1]
    assert last["fits"] and written["scaling"] == "weak"
    for estimate in last["estimates"]:
        assert estimate["samples_per_s"] < 2.1 * last["linear_samples_per_s"]
        ideal = estimate["seconds"] - sum(estimate["losses_s"].values())
        assert estimate["efficiency"] == pytest.approx(ideal / estimate["seconds"])


def test_strong_scaling_bends_and_says_why():
    found = predict(**CNN, between_nodes="Ethernet10", gpus=(1, 8, 64), global_batch=6400)
    text = report.text(found)
    assert "strong scaling, 6400 images" in text
    bend = "bends between 1 and 8 GPUs. Together, 8 GPUs reach "
    assert bend in text and "% of 8 times the speed of one GPU." in " ".join(text.split())
    assert any(cause in text for cause in found.rows[-1].estimates[0].losses)


def test_what_does_not_fit_is_said():
    found = predict("gpt:8x1024x16", "V100-16GB", "NVLink2", gpus=(1,), per_gpu=64)
    text = " ".join(report.text(found).split())
    assert "64 sequences need" in text and "V100-16GB has 16" in text
    assert "use 16 bit (lesson 11)" in text


def test_a_bend_at_one_gpu_has_a_singular():
    """A single GPU can wait for its data."""
    found = predict(**CNN, gpus=(1, 8), loader=Loader(1, 10))
    assert "bends at 1 GPU. 1 GPU reaches " in report.bend(found)
    assert "the speed of one GPU that never waits for data." in report.bend(found)


OWN = Gpu("own", 2**34, 1e12, 1e13, 1e13, 1e13, 1e14, "PCIe3")


def said(prediction: Prediction) -> str:
    """The sentences below the table, without line breaks."""
    return " ".join(" ".join(report.sentences(prediction)).split())


def first_row(prediction: Prediction) -> list[dict]:
    return report.as_json(prediction)["rows"][0]["estimates"]


def test_a_gpu_without_published_efficiencies_has_a_range():
    found = predict("cnn", OWN, "NVLink2", gpus=(1, 8))
    assert [estimate["kernel_time_factor"] for estimate in first_row(found)] == [1, 2]
    text = said(found)
    assert "own has no published efficiencies" in text
    assert "at the data sheet's speed:" in text and "at 0.5 × the data sheet's speed:" in text


def test_a_measured_step_of_one_gpu_gives_the_speed(tmp_path):
    (row,) = predict(**CNN, gpus=(1,), per_gpu=64, times=(1.25,)).rows
    file = tmp_path / "numbers.json"
    flags = ("--model", "cnn", "--gpu", "V100-16GB", "--link", "NVLink2", "--gpus", "1,8")
    step = ("--step-ms", 1e3 * row.estimates[0].seconds, "--per-gpu", 64, "--json", file)
    done = command(*flags, *step)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "measured: 64 images took" in text and "0.8 × the published speed" in text
    (estimate,) = json.loads(file.read_text())["rows"][0]["estimates"]
    assert estimate["seconds"] == pytest.approx(row.estimates[0].seconds, rel=1e-3)
    other = command(*flags, *step, "--step-samples", 32)
    assert "measured: 32 images took" in " ".join(other.output.split())


@pytest.mark.parametrize("gpu", ["V100-16GB", OWN])
def test_each_factor_of_your_own_is_named(gpu):
    """The report names the three factors that were given, not those of shares.py."""
    found = predict("cnn", gpu, "NVLink2", gpus=(1, 8), times=(0.8, 1.0, 4))
    row = first_row(found)
    assert [estimate["kernel_time_factor"] for estimate in row] == [0.8, 1.0, 4]
    assert row[0]["seconds"] < row[1]["seconds"] < row[2]["seconds"]
    assert len(report.as_json(found)["bends"]) == 3
    whole = "published" if gpu == "V100-16GB" else "data sheet's"
    text = said(found)
    for name in ("1.25 × the {}", "the {}", "0.25 × the {}"):
        assert f"at {name.format(whole)} speed:" in text, text
    assert "3 times" in text and "no published" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({**CNN, "model": "lenet"}, ("lenet", "resnet50")),
        ({**CNN, "model": "gpt:large"}, ("gpt:24x2304x24",)),
        ({**CNN, "model": "gpt:0x64x4"}, ("layers",)),
        ({**CNN, "model": "gpt:2000x64x4"}, ("1,000",)),
        ({**CNN, "model": "gpt:2x100x3"}, ("100 hidden", "3 heads")),
        ({**CNN, "model": "gpt:2x64x4x0"}, ("0 tokens",)),
        ({**CNN, "gpu": "V100"}, ("V100-16GB",)),
        ({**CNN, "link": "NVLink9"}, ("NVLink9",)),
        ({**CNN, "between_nodes": "NVLink4"}, ("NVLink4", "HDR200")),
        ({**NODES, "link": "HDR200"}, ("HDR200", "NVLink2")),
        ({**CNN, "gpus_per_node": 4}, ("--between-nodes",)),
        ({**NODES, "gpus_per_node": 0}, ("gpus_per_node",)),
        ({**NODES, "gpus": ()}, ("--gpus",)),
        ({**NODES, "gpus": (0,)}, ("--gpus", "0")),
        ({**NODES, "gpus": (10**9,)}, ("1,000,000,000", "100,000")),
        ({**NODES, "gpus": (12,)}, ("12", "nodes of 8", "16")),
        ({**CNN, "gpus": (1024,)}, ("1,024", "--between-nodes")),
        ({**NODES, "global_batch": 100, "gpus": (8,)}, ("100", "8")),
        ({**NODES, "global_batch": 0}, ("--global-batch",)),
        ({**NODES, "per_gpu": -1}, ("--per-gpu",)),
        ({**NODES, "per_gpu": 8, "global_batch": 64}, ("--per-gpu", "--global-batch")),
        ({**NODES, "per_gpu": 10**12}, ("--per-gpu", "1,000,000,000,000")),
        ({**NODES, "per_gpu": 10**9, "model": "gpt:1x200000x8", "gpus": (1,)}, ("2^60",)),
        ({**NODES, "gpus": (8,), "gpus_per_node": 3}, ("8 GPUs", "nodes of 3", "6", "9")),
        ({**NODES, "gpus": (1.5,)}, ("1.5",)),
        ({**CNN, "link": "NVLnk2"}, ("NVLnk2", "NVLink2")),
        ({**NODES, "precision": "fp8"}, ("fp8", "bf16")),
        ({**NODES, "precision": "bf16"}, ("V100-16GB", "bfloat16", "fp16")),
        ({**NODES, "spread": -0.1}, ("--spread",)),
        ({**CNN, "times": ()}, ("times",)),
        ({**CNN, "times": (1.0, 0.0)}, ("times", "greater than 0")),
        (
            {**CNN, "gpus": (1,), "measured": Measured(60.0, 64)},
            ("--step-ms is 60000", "--step-samples"),
        ),
        ({**CNN, "gpus": (1,), "measured": Measured(float("nan"), 64)}, ("nan ms",)),
        ({**CNN, "gpus": (1,), "measured": Measured(0.001, 0)}, ("at least one sample",)),
        (
            {**CNN, "gpus": (1,), "measured": Measured(0.001, 1), "times": (1.0,)},
            ("not both",),
        ),
    ],
)
def test_nonsense_is_refused_by_a_sentence(arguments, words):
    with pytest.raises(UserError) as error:
        predict(**arguments)
    text = str(error.value)
    assert all(word in text for word in words), text
    assert text.endswith(".") and "\n" not in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpus", "1,eight"), "eight"),
        (("--gpus", ""), "--gpus"),
        (("--workers", 2), "--worker-rate"),
        (("--step-ms", 5), "--step-samples"),
        (("--step-samples", 5), "--step-ms"),
        (("--step-ms", 0, "--per-gpu", 64, "--gpus", 1), "greater than 0"),
        (("--workers", -1, "--worker-rate", 5), "-1"),
        (("--workers", 1, "--worker-rate", 0), "rate"),
        (("--json", "/no/such/folder/file.json", "--gpus", "1"), "/no/such/folder"),
    ],
)
def test_bad_flags_are_refused_by_a_sentence(flags, words):
    done = command("--model", "cnn", "--gpu", "V100-16GB", "--link", "NVLink2", *flags)
    assert isinstance(done.exception, UserError), done.output
    assert words in str(done.exception)


def test_without_a_model_it_names_both_ways():
    done = command("--gpu", "V100-16GB")
    assert isinstance(done.exception, UserError), done.output
    assert "--model, --gpu and --link" in str(done.exception)
    assert "--measured FOLDER" in str(done.exception)


def test_measured_runs_are_drawn(tmp_path):
    for ranks, speed in ((1, 100.0), (2, 150.0)):
        (tmp_path / str(ranks)).mkdir()
        run = {"scaling": "strong", "world_size": ranks, "images_per_s": speed}
        (tmp_path / str(ranks) / "metrics.json").write_text(json.dumps(run))
    done = command("--measured", tmp_path)
    assert done.exit_code == 0 and "1: 1.00×, 2: 1.50×" in done.output
    assert (tmp_path / "scaling.png").exists()
