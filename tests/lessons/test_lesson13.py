"""Lesson 13: the measured run learns what one process learns; points become one picture."""

import json
import statistics
import sys
from dataclasses import replace

import pytest
from commands import ROOT, SILENT_DDP, planted, run_script

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_Scaling as lesson

from multigpu import vgpu
from multigpu.scaling import predict

PAGE = ROOT / "lessons" / "13-scaling"
SCRIPT = ROOT / "scripts" / "PT_CNN_Scaling.py"
FLAGS = ("--epochs", 2, "--prove")

REPEATS_COUNT = """
def all_real(images, batch, rank, index, rows, device=None):
    return torch.ones(rows, dtype=torch.bool, device=device)

lesson.data.real_rows = all_real
"""
FAULTS = {"no sum of gradients": SILENT_DDP, "repeated images count": REPEATS_COUNT}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "batch", "more", "kind", "size"),
    [
        (1, 8, (), "strong", 8),
        (2, 8, (), "strong", 8),
        (3, 12, (), "strong", 12),
        (3, 4, ("--weak",), "weak", 12),
    ],
)
def test_ranks_equal_one_process(tmp_path, npz, ranks, batch, more, kind, size):
    """35 images: the last batch is uneven, and the sampler repeats some."""
    flags = ("--data", npz(), *FLAGS, "--batch-size", batch, "--spawn", ranks, *more)
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stdout
    assert "limit 1e-05: holds" in done.stdout
    found = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert (found["scaling"], found["world_size"]) == (kind, ranks)
    assert found["batch_size"] == size
    steps = -(-35 // size)
    # The first epoch warms up, and an epoch's last step is left out.
    assert len(found["step_seconds"]) == steps - 1
    assert all(seconds > 0 for seconds in found["step_seconds"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    path = planted(tmp_path, "PT_CNN_Scaling", FAULTS[fault])
    more = ("--batch-size", 8, "--spawn", 2, "--out", tmp_path / "o")
    done = run_script(path, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 1, done.stdout
    assert "limit 1e-05: fails" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--spawn", 2, "--batch-size", 7), "over 2 ranks"),
        (("--spawn", "two"), "two"),
        (("--batch-size", 0), "--batch-size"),
        (("--weak", "--batch-size", -1), "--batch-size"),
    ],
)
def test_bad_flags_are_one_sentence(tmp_path, npz, flags, words):
    done = run_script(SCRIPT, "--data", npz(), *flags, "--out", tmp_path / "o")
    assert done.returncode == 2, done.stdout
    assert words in done.stdout and "Traceback" not in done.stdout


def test_a_batch_larger_than_the_data_counts_the_images_that_there_are(tmp_path, npz):
    flags = ("--data", npz(), "--epochs", 2, "--batch-size", 64)
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "o" / "metrics.json").read_text())
    (step,) = found["step_seconds"]
    assert found["images_per_s"] * step == pytest.approx(35)
    assert found["epochs"][1]["images_per_s"] == pytest.approx(found["images_per_s"])


def test_the_page_shows_no_answer_before_its_results():
    page = (PAGE / "README.md").read_text()
    before, results = page.split("Read this and the guide after the notebook")
    figure = "<!--= PT_CNN_Scaling.ipynb"
    assert figure not in before and figure in results
    assert "## The guide" in results


# ---- points of a sweep ----------------------------------------------------------------------


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
    lesson.gather(tmp_path)
    said = capsys.readouterr().out
    assert "strong scaling by ranks: 1: 1.00×, 2: 1.90×, 4: 2.50×" in said
    assert "weak scaling by ranks: 1: 1.00×, 2: 1.90×" in said
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_the_curve_is_drawn_from_0_with_whole_numbers(tmp_path, monkeypatch):
    """Two ranks with 0.79× would otherwise look like none, and have ticks like 0.85."""
    point(tmp_path, 1, 100)
    point(tmp_path, 2, 79)
    figures = []
    monkeypatch.setattr(lesson.plots, "save", lambda figure, path: figures.append(figure))
    lesson.gather(tmp_path)
    axes = figures[-1].axes[0]
    assert axes.get_ylim()[0] == 0
    assert all(tick == int(tick) for tick in axes.get_yticks())
    assert axes.get_title().startswith("2 ranks")


def test_a_point_that_comes_while_the_picture_is_drawn_is_drawn_too(
    tmp_path, capsys, monkeypatch
):
    point(tmp_path, 1, 100)
    save = lesson.plots.save

    def slow_save(*arguments):
        if not (tmp_path / "strong-2").exists():
            point(tmp_path, 2, 150)
        return save(*arguments)

    monkeypatch.setattr(lesson.plots, "save", slow_save)
    lesson.gather(tmp_path)
    assert "2: 1.50×" in capsys.readouterr().out.splitlines()[-2]


def test_without_one_rank_there_is_no_speed_up(tmp_path, capsys):
    point(tmp_path, 2, 150)
    lesson.gather(tmp_path)
    assert "one rank" in capsys.readouterr().out
    assert not (tmp_path / "scaling.png").exists()


@pytest.mark.slow
def test_two_runs_draw_their_curve(tmp_path, npz):
    flags = ("--data", npz(), "--epochs", 2, "--batch-size", 8, "--gather")
    for ranks in (1, 2):
        out = tmp_path / "curve" / f"{ranks}"
        done = run_script(SCRIPT, *flags, "--spawn", ranks, "--out", out)
        assert done.returncode == 0, done.stdout
    assert "strong scaling by ranks: 1: 1.00×, 2:" in done.stdout
    assert (tmp_path / "curve" / "scaling.png").exists()


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
    assert row.memory <= vgpu.GPUS[case.gpu].memory


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
