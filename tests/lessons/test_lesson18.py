"""Lesson 18: eight patients and four others, what each tool prints of them, and the cures."""

import json
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import known
import pytest
import torch
from commands import ROOT, run, run_script, torchrun
from virtual_runs import virtual

from multigpu import prove

PAGE = ROOT / "lessons" / "18-clinic"
SCRIPT = ROOT / "scripts" / "PT_Clinic.py"
FR_TRACE = ("torch.distributed.flight_recorder.fr_trace",)
TWO = ("torchrun", "--nproc-per-node=2")
TEXT = SCRIPT.read_text()


def line_of(text: str, after: str, path: Path = SCRIPT) -> int:
    """The number of the first line with `text` after the one with `after`."""
    lines = path.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if after in line)
    return next(n for n, line in enumerate(lines, 1) if n > start and text in line)


# ---- cured: what one rank computes ----------------------------------------------------------


def weights(folder: Path, ranks: int, *flags: object, script: Path = SCRIPT) -> torch.Tensor:
    """The weights after a cured patient's training, in one vector."""
    done = torchrun(ranks, script, "--cured", *flags, "--out", folder / f"{ranks}")
    assert done.returncode == 0, done.stdout
    found = torch.load(folder / f"{ranks}" / "model.pt")
    metrics = json.loads((folder / f"{ranks}" / "metrics.json").read_text())
    assert f"loss {metrics['loss']:.4f}" in done.stdout
    return torch.cat([weight.flatten() for weight in found.values()])


@pytest.mark.slow
@pytest.mark.parametrize("patient", ["condition", "order", "nan", "slow", "wrong", "network"])
def test_cured_two_ranks_compute_what_one_computes(tmp_path, patient):
    one, two = (weights(tmp_path, ranks, "--patient", patient) for ranks in (1, 2))
    assert (one - two).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("patient", ["batches", "died"])
def test_the_other_two_train_when_cured(tmp_path, patient):
    """Two ranks have other batches than one, or images without a label in one half."""
    assert weights(tmp_path, 2, "--patient", patient).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "right",
    ["        dist.all_reduce(weight.grad)\n", " / dist.get_world_size()", "[rank::ranks]"],
)
def test_without_its_synchronization_two_ranks_compute_something_else(tmp_path, right):
    assert right in TEXT
    wrong = tmp_path / "wrong.py"
    wrong.write_text(TEXT.replace(right, "[: 8 + rank]" if "::" in right else ""))
    one = weights(tmp_path, 1, "--patient", "slow")
    two = weights(tmp_path, 2, "--patient", "slow", script=wrong)
    assert (one - two).abs().max() > 1e-4


# ---- ill: what the tools print --------------------------------------------------------------


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """printed(patient) is what the tools of the page's table print of it."""
    folder = tmp_path_factory.mktemp("ill")

    def ill(patient: str, *flags: object, **environment: object) -> str:
        more = (*flags, "--timeout", 3, "--out", folder / "out")
        done = torchrun(2, SCRIPT, "--patient", patient, *more, **environment)
        assert done.returncode == 1, done.stdout
        return done.stdout

    @cache
    def of_patient(patient: str) -> str:
        if patient == "condition":
            return stacks(patient)
        if patient == "order":
            return recorded(folder)
        if patient == "batches":
            return ill("batches", TORCH_DISTRIBUTED_DEBUG="DETAIL")
        if patient == "nan":
            return ill("nan", "--anomaly")
        if patient == "network":
            alone = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0, "MASTER_ADDR": "127.0.0.1"}
            flags = ("--patient", "wrong", "--out", folder / "out")
            interface = run_script(SCRIPT, *flags, GLOO_SOCKET_IFNAME="ib0", **alone)
            return ill("network") + interface.stdout
        return ill(patient)

    return of_patient


def stacks(patient: str) -> str:
    """The two stacks that the notebook prints."""
    if shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed")
    code = f"import sys; sys.path.insert(0, {str(PAGE)!r})\n"
    code += f"import experiments; experiments.stacks({patient!r})"
    done = run(sys.executable, "-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    if "py-spy may not" in done.stdout:
        pytest.skip("py-spy may not read another process here")
    return done.stdout


def recorded(folder: Path) -> str:
    """The report of `multigpu virtual` on `order`, and torchfrtrace's on what it recorded."""
    recorder = {"TORCH_NCCL_DUMP_ON_TIMEOUT": 1, "TORCH_FR_DUMP_TEMP_FILE": folder / "trace_"}
    flags = ("--patient", "order", "--timeout", 60)
    done = virtual(folder, "--gpus", 2, "--timeout", 5, *TWO, SCRIPT, *flags, **recorder)
    analysed = run_script(Path("-m"), *FR_TRACE, "--prefix", "trace_", folder)
    return done.stdout + analysed.stdout


@pytest.mark.slow
def test_the_stacks_are_under_the_condition_and_in_the_barrier(printed):
    text = printed("condition")
    first, second = text.split("RANK_1")
    assert f"condition (PT_Clinic.py:{line_of('dist.all_reduce', 'def condition')})" in first
    assert f"condition (PT_Clinic.py:{line_of('dist.barrier', 'def condition')})" in second


@pytest.mark.slow
def test_with_nccl_the_barrier_takes_the_all_reduce_and_the_stack_is_a_line_further(tmp_path):
    flags = ("--patient", "condition", "--timeout", 60)
    done = virtual(tmp_path, "--gpus", 2, "--timeout", 5, *TWO, SCRIPT, *flags)
    barrier = line_of("dist.barrier", "def condition")
    assert re.search(rf"rank 0 waits in barrier .*PT_Clinic.py:{barrier}\n", done.stdout)
    assert "mean loss" in done.stdout, "rank 0 has gone on, with a wrong number"


@pytest.mark.slow
def test_without_the_barrier_the_report_names_the_condition(tmp_path):
    (tmp_path / "copy18.py").write_text(TEXT.replace("    dist.barrier()", "    # barrier"))
    flags = ("--patient", "condition", "--timeout", 60)
    done = virtual(tmp_path, "--gpus", 2, "--timeout", 5, *TWO, "copy18.py", *flags)
    assert "likely: all_reduce is called under `if rank == 0 or cured`" in done.stdout


@pytest.mark.slow
def test_the_flight_recorder_has_the_other_order(printed):
    text = printed("order")
    assert "with other sizes: [320] on rank 0, [64] on rank 1" in text
    assert "SIZE_OR_SYNTAX_MISMATCH" in text and "Culprit rank 1" in text
    assert f"order at {SCRIPT}:{line_of('update(models', 'def order')}" in text


@pytest.mark.slow
def test_other_orders_do_not_hang_with_gloo(tmp_path):
    done = torchrun(2, SCRIPT, "--patient", "order", "--out", tmp_path)
    assert done.returncode == 1 and "exitcode  : -6" in done.stdout, done.stdout


@pytest.mark.slow
def test_detail_is_right_about_a_rank_itself_alone(printed):
    text = printed("batches")
    own = r"\[rank1\].*Rank 1 is running collective: CollectiveFingerPrint\(\S*OpType=BARRIER"
    assert re.search(own, text), text
    other = re.search(r"\[rank0\].*but Rank 1 is running collective: \S*OpType=(\w+)", text)
    assert other and other[1] != "BARRIER", "torch has mended it: change the lesson"


@pytest.mark.slow
def test_the_first_error_is_that_of_the_rank_that_died(printed):
    # torchrun's clock counts seconds: within one, it takes the lowest rank for the first.
    reports = re.split(r"\btime +:", printed("died").partition("FAILED")[2])
    text = "".join(report for report in reports if re.search(r"rank +: 1 ", report))
    assert "IndexError: Target 10 is out of bounds" in text
    assert f'PT_Clinic.py", line {line_of("update(", "def died")}, in died' in text


@pytest.mark.slow
def test_the_nan_begins_in_a_root_on_rank_1(printed):
    text = printed("nan")
    assert f'PT_Clinic.py", line {line_of(".sqrt()", "def nan")}, in nan' in text
    assert "[rank1]: RuntimeError: Function 'SqrtBackward0' returned nan" in text
    assert "[rank0]: RuntimeError: Function" not in text
    assert "step 0: loss 2" in text and "loss nan" not in text


@pytest.mark.slow
def test_a_wrong_gradient_is_named_and_hardly_changes_the_loss(in_forks, experiments):
    command = [*TWO, str(SCRIPT), "--patient", "wrong"]
    found = prove.run(command, steps=2)
    assert found.verdict == "fails" and "its forward is not called" in str(found)
    assert prove.run([*command, "--cured"], steps=2).verdict == "holds"
    ill, cured = experiments.final_losses("wrong")
    assert 0 < abs(ill / cured - 1) < 0.01


@pytest.mark.slow
def test_the_pages_table_says_what_the_tools_print(printed):
    """The texts in the third column; a test above has those of `slow` and `wrong`."""
    rows = re.findall(
        r"^\| .*\| (.*) \| .* \((\w+)\) \|$", (PAGE / "README.md").read_text(), re.M
    )
    assert [patient for _, patient in rows[1:]] == PATIENTS.split()
    for column, patient in rows[1:]:
        if patient not in ("slow", "wrong"):
            for text in re.findall("`(.*?)`", column):
                parts = [part.strip() for part in text.split("…")]
                assert all(part in printed(patient) for part in parts), text


PATIENTS = "condition order batches died nan slow network wrong"


# ---- the exercise's patients ----------------------------------------------------------------


def right_answers(name: str) -> tuple[int, int, str]:
    """The rank, the line and the cause that the exercise's solution gives for a patient."""
    names: dict = {}
    exec(known.answer_cell("18-clinic", "guess_patients"), names)
    return tuple(names[f"guess_{name}_{part}"] for part in ("rank", "line", "cause"))


def other(name: str) -> Path:
    return PAGE / "others" / f"{name}.py"


@pytest.mark.slow
def test_a_rank_stops_by_its_own_loss(tmp_path):
    rank, line, _ = right_answers("stopping")
    path = other("stopping")
    done = virtual(tmp_path, "--gpus", 2, "--timeout", 5, *TWO, path)
    after = line_of("dist.all_reduce(loss)", "loss.detach()", path)
    assert re.search(rf"rank {rank} waits in .*stopping.py:{after}\n", done.stdout), (
        done.stdout
    )
    assert re.search(rf"rank {1 - rank} waits in .*stopping.py:30\n", done.stdout)
    assert line == line_of("break", "loss.item() > before", path)


@pytest.mark.slow
def test_a_stage_waits_for_one_message_too_many(tmp_path):
    rank, line, _ = right_answers("stages")
    done = virtual(tmp_path, "--gpus", 2, "--timeout", 5, *TWO, other("stages"))
    assert re.search(rf"rank {rank} waits in recv .*stages.py:{line}\n", done.stdout)
    assert "micro-batch 3:" in done.stdout and "micro-batch 4:" not in done.stdout


@pytest.mark.slow
def test_each_rank_shuffles_by_its_own_seed(in_forks):
    rank, line, _ = right_answers("shuffle")
    found = prove.run([*TWO, str(other("shuffle"))], steps=2)
    assert "each draws its own by its own seed" in str(found), str(found)
    assert rank == 1 and line == line_of("manual_seed(rank)", "optimizer", other("shuffle"))


@pytest.mark.slow
def test_a_rank_has_the_longer_sequences(tmp_path):
    rank, line, _ = right_answers("lengths")
    report = tmp_path / "report.json"
    done = virtual(tmp_path, "--gpus", 2, "--json", report, *TWO, other("lengths"))
    assert done.returncode == 0, done.stdout
    busy = [gpu["compute_seconds"] for gpu in json.loads(report.read_text())["gpus"]]
    assert busy[rank] > 1.1 * busy[1 - rank]
    assert line == line_of("chunk(ranks)", "for batch", other("lengths"))


def test_the_others_are_plain_torch():
    for path in (PAGE / "others").glob("*.py"):
        modules = set(re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.M))
        assert modules <= {*sys.stdlib_module_names, "torch"}
