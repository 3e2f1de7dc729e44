"""Lesson 13: two ranks compute what one does; points become one picture; the guide."""

import json
import statistics

import pytest
from commands import ROOT, SILENT_DDP, planted, torchrun

import multigpu
from multigpu import prove
from multigpu.errors import UserError
from multigpu.scaling import points, predict

SCRIPT = ROOT / "scripts" / "PT_CNN_Scaling.py"
PAGE = ROOT / "lessons" / "13-scaling"
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")


# ---- the script -----------------------------------------------------------------------------


def proof(path, data, *flags: object) -> prove.Proof:
    """35 images in batches of 8: the last batch has 3, and the sampler repeats an image."""
    words = (*TORCHRUN, path, "--data", data, "--batch-size", 8, "--epochs", 2, *flags)
    return prove.run([str(word) for word in words], steps=6, timeout=100)


@pytest.mark.long
@pytest.mark.slow
def test_strong_scaling_on_two_ranks_computes_what_one_rank_computes(in_forks, few_digits):
    found = proof(SCRIPT, few_digits())
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_weak_scaling_is_the_training_with_a_larger_batch(in_forks, few_digits):
    found = proof(SCRIPT, few_digits(), "--weak")
    assert found.verdict == "holds", str(found)
    assert "the batch size of its DataLoaders multiplied by 2" in str(found)


@pytest.mark.slow
def test_without_an_all_reduce_the_proof_fails(in_forks, few_digits, tmp_path):
    found = proof(planted(tmp_path, "PT_CNN_Scaling", SILENT_DDP), few_digits())
    assert found.verdict == "fails", str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "kind", "size"), [((), "strong", 12), (("--weak",), "weak", 36)]
)
def test_a_run_keeps_its_steps(tmp_path, few_digits, more, kind, size):
    """The first epoch warms up, and an epoch's last step can be smaller: both are left out."""
    flags = ("--data", few_digits(75), "--epochs", 3, "--batch-size", 12, *more)
    done = torchrun(3, SCRIPT, *flags, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stdout
    assert f"{size} images a step ({kind} scaling)" in done.stdout
    found = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert (found["scaling"], found["world_size"], found["batch_size"]) == (kind, 3, size)
    seconds = found["step_seconds"]
    assert len(seconds) == 2 * (-(-75 // size) - 1) and min(seconds) > 0
    assert found["images_per_s"] * statistics.median(seconds) == pytest.approx(size)


@pytest.mark.slow
def test_a_batch_larger_than_the_data_counts_the_images_that_there_are(tmp_path, few_digits):
    flags = ("--data", few_digits(), "--epochs", 1, "--batch-size", 64)
    done = torchrun(1, SCRIPT, *flags, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "o" / "metrics.json").read_text())
    (step,) = found["step_seconds"]
    assert found["images_per_s"] * step == pytest.approx(35)


@pytest.mark.parametrize("flags", [("--batch-size", 7), ("--weak", "--batch-size", 0)])
def test_a_batch_that_the_ranks_cannot_share_is_one_sentence(tmp_path, few_digits, flags):
    done = torchrun(2, SCRIPT, "--data", few_digits(), *flags, "--out", tmp_path / "o")
    assert "error: --batch-size must be a multiple of the 2 ranks" in done.stdout


# ---- points of a curve ----------------------------------------------------------------------


def point(folder, ranks: int, images_per_s: float, kind: str = "strong") -> None:
    path = folder / f"{kind}-{ranks}"
    path.mkdir(parents=True)
    run = {"world_size": ranks, "scaling": kind, "images_per_s": images_per_s}
    (path / "metrics.json").write_text(json.dumps(run))


def test_points_are_gathered_into_one_picture(tmp_path, capsys):
    for ranks, images_per_s in ((4, 250), (1, 100), (2, 190)):
        point(tmp_path, ranks, images_per_s)
    point(tmp_path, 1, 50, "weak")
    point(tmp_path, 2, 95, "weak")
    other = tmp_path / "another-lesson" / "metrics.json"
    other.parent.mkdir()
    other.write_text('{"world_size": 2, "images_per_s": 1}')
    points.gather(tmp_path)
    said = capsys.readouterr().out
    assert "strong scaling by ranks: 1: 1.00×, 2: 1.90×, 4: 2.50×" in said
    assert "weak scaling by ranks: 1: 1.00×, 2: 1.90×" in said
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_without_one_rank_there_is_no_speed_up(tmp_path, capsys):
    point(tmp_path, 2, 150)
    points.gather(tmp_path)
    assert "one rank" in capsys.readouterr().out
    assert not (tmp_path / "scaling.png").exists()


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"--measured is .*--out"):
        points.gather(tmp_path)


def test_a_half_written_point_is_left_out(tmp_path, capsys):
    """Another task of the job array is writing it."""
    point(tmp_path, 1, 100)
    (tmp_path / "strong-2").mkdir()
    (tmp_path / "strong-2" / "metrics.json").write_text('{"scaling": ')
    points.gather(tmp_path)
    said = capsys.readouterr().out
    assert "left out" in said and "strong scaling by ranks: 1: 1.00×\n" in said


# ---- published clusters, the guide ----------------------------------------------------------


def test_the_stored_table_is_what_the_rows_give(experiments):
    """The cheapest row; `python benchmarks/scaling.py` computes all of them."""
    stored = json.loads((ROOT / "benchmarks" / "scaling.json").read_text())
    names = [row.name for row in experiments.PUBLISHED]
    assert [row["name"] for row in stored["rows"]] == names
    (found,) = experiments.published_rows(experiments.PUBLISHED[1:2]).values()
    row = stored["rows"][1]
    assert found == (row["published"], pytest.approx(row["predicted"]), row["cause"])
    (simulated,) = experiments.published_rows(experiments.PUBLISHED[1:2], False).values()
    assert simulated[1] == pytest.approx(row["uncalibrated"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("cnn", 64, 1), "01"),
        (("cnn", 64, 8), "larger batch"),
        (("vgg16", 256, 16, "A100-80GB", "NVLink3", "Ethernet10"), "10: send less"),
        (("gpt:8x1024x16", 1024, 8), "--accumulate"),
        (("gpt:48x6144x48", 64, 64), "15: FSDP, or replicas of 8 stages"),
        (("gpt:48x6144x48", 60, 60), "15: FSDP, or replicas of 5 stages"),
        (("gpt:48x6144x48", 8, 8), "15: FSDP, or 03: 8 stages"),
        (("gpt:48x6144x48", 4, 4), "at least 5 GPUs"),
        # Its 16 bytes a weight fit, one sequence does not.
        (("gpt:40x3072x24", 8, 8), "15: FSDP, with checkpointing"),
        (("vgg16", 1024, 8), "05: DDP"),
    ],
)
def test_the_guide_names_the_lesson(experiments, case, words):
    method, reason = experiments.guide(experiments.Case(*case))
    assert words in method, (method, reason)
    assert any(letter.isdigit() for letter in reason)


def test_what_is_accumulated_fits(experiments):
    case = experiments.Case("gpt:8x1024x16", 1024, gpus=8)
    _, reason = experiments.guide(case)
    fits = int(reason.split("; ")[1].split()[0])
    (row,) = predict(
        case.model, case.gpu, case.link, gpus=(1,), per_gpu=fits, precision=case.precision
    ).rows
    assert row.memory <= multigpu.GPUS[case.gpu].memory
