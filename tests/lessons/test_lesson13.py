"""Lesson 13: two ranks compute what one does; points become one picture; the guide."""

import json
import statistics
from dataclasses import replace

import pytest
from commands import ROOT, SILENT_DDP, planted, run_script, torchrun

import multigpu
from multigpu import prove
from multigpu.errors import UserError
from multigpu.scaling import points, predict

PAGE = ROOT / "lessons" / "13-scaling"
SCRIPT = ROOT / "scripts" / "PT_CNN_Scaling.py"
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")


# ---- the script -----------------------------------------------------------------------------


def proof(path, data, *flags: object) -> prove.Proof:
    """35 images in batches of 8: the last batch has 3, and the sampler repeats an image."""
    words = (*TORCHRUN, path, "--data", data, "--batch-size", 8, "--epochs", 2, *flags)
    return prove.run([str(word) for word in words], steps=6, timeout=100)


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "Try: torchrun --standalone"),
        (("--epochs", 0), "--epochs"),
        (("--data", "no.npz"), "No such file"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    done = run_script(SCRIPT, *flags, cwd=tmp_path)
    assert done.returncode != 0
    assert words in done.stdout.splitlines()[-1] and "Traceback" not in done.stdout


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


def test_the_curve_is_drawn_from_0_with_whole_numbers(tmp_path, monkeypatch):
    """Two ranks with 0.79× would otherwise look like none, and have ticks like 0.85."""
    point(tmp_path, 1, 100)
    point(tmp_path, 2, 79)
    figures = []
    monkeypatch.setattr(points.plots, "save", lambda figure, path: figures.append(figure))
    points.gather(tmp_path)
    axes = figures[-1].axes[0]
    assert axes.get_ylim()[0] == 0
    assert all(tick == int(tick) for tick in axes.get_yticks())
    assert axes.get_title().startswith("2 ranks")


def test_a_point_that_comes_while_the_picture_is_drawn_is_drawn_too(
    tmp_path, capsys, monkeypatch
):
    point(tmp_path, 1, 100)
    save = points.plots.save

    def slow_save(*arguments):
        if not (tmp_path / "strong-2").exists():
            point(tmp_path, 2, 150)
        return save(*arguments)

    monkeypatch.setattr(points.plots, "save", slow_save)
    points.gather(tmp_path)
    assert "2: 1.50×" in capsys.readouterr().out.splitlines()[-2]


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


def test_the_stored_errors_are_those_of_the_stored_rows():
    """The constants are the best guesses of someone who computes nothing."""
    stored = json.loads((ROOT / "benchmarks" / "scaling.json").read_text())
    published = [row["published"] for row in stored["rows"]]
    without = [abs(row["uncalibrated"] - row["published"]) for row in stored["rows"]]
    assert stored["uncalibrated_error"] == pytest.approx(statistics.mean(without))
    middle = statistics.median(published)
    apart = [abs(middle - efficiency) for efficiency in published]
    assert stored["constant"] == middle
    assert stored["constant_error"] == pytest.approx(statistics.mean(apart))
    missed = []
    for number, efficiency in enumerate(published):
        others = published[:number] + published[number + 1 :]
        missed.append(abs(statistics.median(others) - efficiency))
    assert stored["others_error"] == pytest.approx(statistics.mean(missed))


def test_sorted_by_efficiency_only_the_lowest_is_in_its_place():
    """The notebook says so."""
    rows = json.loads((ROOT / "benchmarks" / "scaling.json").read_text())["rows"]
    found, expected = (
        [row["name"] for row in sorted(rows, key=lambda row: row[key])]
        for key in ("predicted", "published")
    )
    same = [a == b for a, b in zip(found, expected, strict=True)]
    assert same == [True, False, False, False, False]


def test_no_prediction_uses_the_efficiency_that_it_is_compared_with(experiments):
    row = experiments.PUBLISHED[1]
    changed = replace(row, efficiency=0.1)
    ((_, predicted, cause),) = experiments.published_rows([row]).values()
    ((published, *unchanged),) = experiments.published_rows([changed]).values()
    assert published == 0.1
    assert unchanged == [predicted, cause]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("cnn", 64, 1), "01"),
        (("cnn", 64, 8), "larger batch"),
        (("vgg16", 256, 16, "A100-80GB", "NVLink3", "Ethernet10"), "10: send less"),
        (("gpt:8x1024x16", 1024, 8), "--accumulate"),
        (("gpt:48x6144x48", 64, 64), "06: FSDP, or replicas of 8 stages"),
        (("gpt:48x6144x48", 60, 60), "06: FSDP, or replicas of 5 stages"),
        (("gpt:48x6144x48", 8, 8), "06: FSDP, or 03: 8 stages"),
        (("gpt:48x6144x48", 4, 4), "at least 5 GPUs"),
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_does_not_fit_is_given_in_the_case_s_precision_and_in_fp32(
    experiments, precision
):
    """So nobody takes 16 bit for a remedy where the figure is that of 16 bit."""
    case = experiments.Case("gpt:8x1024x16", 1024, gpus=8, precision=precision)
    _, reason = experiments.guide(case)
    for name in {"fp32", precision}:
        (row,) = predict(
            case.model, case.gpu, case.link, gpus=(1,), per_gpu=128, precision=name
        ).rows
        assert f"{row.memory / 2**30:,.0f} GiB in {name}" in reason
    assert ("bf16" in reason) == (precision == "bf16")
