"""The job files do what their comments say.

What a job file does by itself is shown in a shell, with stand-ins for Slurm (job_shell.py).
What Slurm does with it is shown on the classroom cluster, with a stand-in for the script.
`make test-jobs` runs each job file with its own script.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from commands import ROOT, SCRIPT, torchrun
from job_shell import SCRIPT as STAND_IN
from job_shell import programs, run_job

from multigpu.course import LESSONS

on_cluster = pytest.mark.classroom
on_request = pytest.mark.skipif("ALL_JOBS" not in os.environ, reason="make test-jobs runs it")

JOB_FILES = sorted((ROOT / "slurm").glob("*.slurm"))
each_job_file = pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.stem)
LESSON = "slurm/PT_CNN_MultiGPU.slurm"
# Its inner shell reports how torchrun has ended, and itself ends with 0.
DEMONSTRATION = "Signals"


def script_of(path: Path) -> str:
    (script,) = re.findall(r"\nscript=\$\{SCRIPT:-(\S+)\}\n", path.read_text())
    return script


# ---- what is written in them ----------------------------------------------------------------


@each_job_file
def test_it_is_short_and_every_sbatch_line_is_commented_on(path: Path):
    lines = path.read_text().splitlines()
    assert len(lines) <= (80 if "Elastic" in path.stem else 40)
    assert lines[0] == "#!/bin/bash"
    sbatch = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [
        number for number, line in enumerate(lines) if line and not line.startswith("#")
    ]
    assert sbatch and max(sbatch) < min(commands), (
        "sbatch ignores options after the first command"
    )
    for number in sbatch:
        assert re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)? +# \S.*", lines[number]), lines[number]
    for option in ("nodes", "ntasks-per-node", "gpus-per-node"):
        assert sum(line.startswith(f"#SBATCH --{option}=") for line in lines) == 1
    assert (ROOT / script_of(path)).exists()


def test_each_notebook_has_a_job_file():
    """PT_CNN_ElasticNode, whose ranks are on several jobs, and Signals come in addition."""
    stems = {notebook.stem for lesson in LESSONS for notebook in lesson.notebooks}
    assert {path.stem for path in JOB_FILES} == stems | {"PT_CNN_ElasticNode", "Signals"}


def test_each_script_has_a_job_that_make_test_jobs_runs():
    """PT_CNN_Scaling's runs below, once for each number of nodes."""
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert set(EACH_STEM) == scripts - {"PT_CNN_Scaling"}


@pytest.mark.parametrize("stem", ["TF_CNN_MultiGPU", "TF_CNN_CustomLoop", "TF_CNN_MultiNode"])
def test_a_tensorflow_job_says_how_to_install_its_gpu_build(stem: str):
    """By `make`, and with the name that pyproject.toml gives to the extra packages."""
    text = (ROOT / f"slurm/{stem}.slurm").read_text()
    (extra,) = re.findall(r"make install VENV=\S+ .*'\.\[([\w-]+)\]'", text)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any("and-cuda" in name for name in packages["optional-dependencies"][extra])
    assert re.search(rf"COURSE_ENV=\S+ sbatch slurm/{stem}\.slurm", text)


# ---- what they do, without Slurm ------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """The repository's root, with stand-ins for Slurm's programs and for all scripts."""
    programs(tmp_path / "bin")
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    for path in JOB_FILES:
        script = tmp_path / script_of(path)
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(STAND_IN)
    (tmp_path / "mine.py").write_text(STAND_IN)
    return tmp_path


@each_job_file
def test_a_job_runs_its_script_with_the_options_and_ends_with_its_code(path, shell: Path):
    options = ("--code", "7", "--note", "two words")
    done = run_job(shell, f"slurm/{path.name}", *options)
    assert path.stem == DEMONSTRATION or done.code == 7, done.text
    seen = done.seen
    assert seen["script"] == script_of(path)
    assert tuple(seen["options"][-4:]) == options
    assert seen["MASTER_ADDR"] == "127.0.0.1" and int(seen["MASTER_PORT"]) >= 15041
    # The three cores of a task, which a torchrun shares out to two ranks.
    shared_out = path.stem in (
        "PT_CNN_MultiGPU",
        "PT_CNN_Elastic",
        "PT_CNN_ElasticNode",
        "PT_GPT_FSDP",
        "PT_GPT_TensorParallel",
        "PT_GPT_Mesh",
        "PT_GPT_ContextExperts",
    )
    assert seen["OMP_NUM_THREADS"] == ("2" if shared_out else "3")
    if path.stem != DEMONSTRATION:
        out = seen["options"][seen["options"].index("--out") + 1]
        assert re.fullmatch(r"results/\S+-41(/\d)?", out), "each job has a folder of its own"


@each_job_file
def test_a_copy_in_another_folder(path: Path, shell: Path):
    """The script, its job file and activate.sh side by side; or another script beside it."""
    folder = shell / "elsewhere"
    folder.mkdir()
    for name in (script_of(path), f"slurm/{path.name}", "slurm/activate.sh", "mine.py"):
        shutil.copy(shell / name, folder)
    shutil.copytree(shell / "bin", folder / "bin")
    assert run_job(folder, path.name).seen["script"] == Path(script_of(path)).name
    assert run_job(folder, path.name, SCRIPT="mine.py").seen["script"] == "mine.py"


@each_job_file
def test_the_lines_that_replace_activate_sh(path: Path, shell: Path):
    """The job file runs with them, and without activate.sh."""
    text = path.read_text()
    if path.stem == DEMONSTRATION:
        (new,) = re.findall(r"Without activate\.sh, `(source \S+)`", text)
    else:
        (new,) = re.findall(r"with `shared`:\n((?:#     .*\n)+)", text)
        new = new.replace("#     ", "")
    old = re.findall(r"(?m)^[^#\n]*\bshared\b.*\n", text)
    assert len(old) == 3 and "".join(old) in text
    (shell / "job").write_text(text.replace("".join(old), f"{new}\n"))
    (shell / "venv/bin").mkdir(parents=True)
    (shell / "venv/bin/activate").write_text(f'echo active; export PATH="{shell}/bin:$PATH"\n')
    shutil.rmtree(shell / "slurm")
    done = run_job(shell, "job", "--code", "7", SCRIPT="mine.py", PATH="/usr/bin:/bin")
    assert "active" in done.text and done.seen["script"] == "mine.py"
    assert path.stem == DEMONSTRATION or done.code == 7, done.text


def test_the_address_and_the_port(shell: Path):
    """An address that is set is kept. A port that another program uses is skipped."""
    with ExitStack() as stack:
        with suppress(OSError):  # if another program uses the port already
            stack.enter_context(socket.create_server(("127.0.0.1", 15041)))
        done = run_job(shell, LESSON, MASTER_ADDR="localhost")
    assert done.seen["MASTER_ADDR"] == "localhost"
    assert int(done.seen["MASTER_PORT"]) > 15041


def test_a_script_that_needs_cuda_on_the_classroom_cluster(shell: Path):
    """The job file starts again, with virtual GPUs, its options, and its exit code."""
    programs(shell / "bin", multigpu='echo "multigpu $*"; MULTIGPU_VIRTUAL=1 exec "${@:8}"\n')
    classroom = {"SLURM_CLUSTER_NAME": "multigpu-classroom"}
    for stem in ("PT_CNN_DataParallel", "PT_CNN_ModelParallel", "PT_CNN_HybridParallel"):
        job = f"slurm/{stem}.slurm"
        done = run_job(shell, job, "--code", "7", "--note", "two words", **classroom)
        (line,) = re.findall(r"(?m)^multigpu (.*)", done.text)
        assert line.startswith("virtual --gpus 2 --gpus-per-node 2 --between-nodes")
        assert done.code == 7 and done.seen["options"][-2:] == ["--note", "two words"]
        assert "multigpu" not in run_job(shell, job, SLURM_CLUSTER_NAME="elsewhere").text
    assert "multigpu virtual" not in run_job(shell, LESSON, **classroom).text


@each_job_file
def test_started_without_slurm(path: Path, shell: Path):
    done = run_job(shell, f"slurm/{path.name}", SLURM_JOB_ID="", SLURMD_NODENAME="")
    assert done.code == 2 and done.text.count("\n") == 1, done.text
    assert f"sbatch slurm/{path.name}" in done.text


@each_job_file
def test_submitted_in_a_folder_without_the_script(path: Path, shell: Path):
    done = run_job(shell / "slurm", path.name, PATH=f"{shell}/bin:/usr/bin:/bin")
    assert done.code == 2 and done.text.count("\n") == 1, done.text
    assert f"there is no {Path(script_of(path)).name} in {shell}/slurm" in done.text
    done = run_job(shell / "bin", path, PATH=f"{shell}/bin:/usr/bin:/bin")
    assert (done.code, done.text.count("\n")) == (2, 1), done.text
    assert "submit in the repository's root" in done.text


# ---- on a real Slurm ------------------------------------------------------------------------

# Prints where it runs, then fails or sleeps as its flags say.
PLACES = """
import os, sys, time
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
names = ("WORLD_SIZE", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
values = [f"{name}={os.environ.get(name)}" for name in names]
line = " ".join(["rank", rank, *values, str(sys.argv[1:])])
# One write, so that no other rank writes in between.
os.write(1, (line + chr(10)).encode())
open("up-" + rank, "w").close()
if "--one-dies" in sys.argv:
    if rank == "3":
        # Otherwise it would end ranks that have not printed their line yet.
        while not all(os.path.exists(f"up-{other}") for other in range(4)):
            time.sleep(0.01)
        sys.exit(7)
    time.sleep(600)
if "--sleep" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository's root with the real job files and PLACES as two lessons' scripts."""
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    (tmp_path / "scripts").mkdir()
    for stem in ("PT_CNN_MultiGPU", "PTL_multiGPU"):
        (tmp_path / f"scripts/{stem}.py").write_text(PLACES)
    return tmp_path


def ranks(log: str) -> list[list[str]]:
    return sorted(line.split() for line in log.splitlines() if line.startswith("rank "))


@on_cluster
@each_job_file
def test_sbatch_accepts_it(path: Path, cluster):
    tried = cluster.run("sbatch", "--test-only", path, cwd=ROOT)
    assert tried.returncode == 0 and "to start at" in tried.stderr, tried.stderr


@on_cluster
def test_a_job_by_torchrun(cluster, root: Path):
    job = cluster.job(LESSON, "--epochs", "3", cwd=root)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert (root / f"PT_CNN_MultiGPU-{job.number}.out").exists()
    assert f"rendezvous: 127.0.0.1:{15000 + job.number % 10000}\n" in job.log
    assert [line[1:3] for line in ranks(job.log)] == [
        [str(rank), "WORLD_SIZE=4"] for rank in range(4)
    ], job.log
    assert [line[3] for line in ranks(job.log)] == [
        f"SLURMD_NODENAME={node}" for node in ("n1", "n1", "n2", "n2")
    ]
    assert {tuple(line[4:6]) for line in ranks(job.log)} == {
        ("CUDA_VISIBLE_DEVICES=0,1", "OMP_NUM_THREADS=1")
    }
    assert f"['--out', 'results/PT_CNN_MultiGPU-{job.number}', '--epochs', '3']" in job.log


@on_cluster
def test_a_job_by_srun_at_a_site_that_exports_nothing(cluster, root: Path):
    """srun passes on what the job file has set, and the job has its ranks' exit code."""
    job = cluster.job(
        *(f"--export=COURSE_ENV={sys.prefix}", "slurm/PTL_multiGPU.slurm", "--one-dies"),
        cwd=root,
    )
    assert job.state == "FAILED" and job.exit_code in (7, 143), job.log
    found = [(line[1], *line[3:6]) for line in ranks(job.log)]
    assert found == [
        (str(rank), f"SLURMD_NODENAME=n{rank // 2 + 1}", "CUDA_VISIBLE_DEVICES=0,1", threads)
        for rank, threads in enumerate(["OMP_NUM_THREADS=1"] * 4)
    ], job.log


@on_cluster
def test_other_sizes_on_the_command_line_and_gres_in_the_file(cluster, root: Path):
    """One torchrun per node, whatever --ntasks-per-node is; its ranks share its cores."""
    path = root / LESSON
    path.write_text(path.read_text().replace("--gpus-per-node=2 ", "--gres=gpu:2 "))
    sizes = ("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=3")
    job = cluster.job(*sizes, LESSON, cwd=root)
    assert [line[2] for line in ranks(job.log)] == ["WORLD_SIZE=2"] * 2, job.log
    assert {line[5] for line in ranks(job.log)} == {"OMP_NUM_THREADS=2"}


@on_cluster
def test_a_rank_that_dies_ends_the_job_at_once(cluster, root: Path):
    # The other ranks would sleep for ten minutes.
    job = cluster.job(LESSON, "--one-dies", cwd=root, timeout=90)
    # torchrun's, or that of the torchrun which srun has ended
    assert job.state == "FAILED" and job.exit_code in (1, 143), job.log
    assert len(ranks(job.log)) == 4


NEEDS_CUDA = """
import sys, torch
layer = torch.nn.Linear(2, 2).to("cuda:1")
print(torch.cuda.device_count(), "GPUs,", layer(torch.ones(1, 2, device="cuda:1")).device)
sys.exit(5)
"""


@on_cluster
def test_a_copied_job_on_virtual_gpus(cluster, tmp_path: Path):
    """The cluster has no CUDA: activate.sh starts Python with two virtual GPUs."""
    (tmp_path / "PT_CNN_DataParallel.py").write_text(NEEDS_CUDA)
    for name in ("PT_CNN_DataParallel.slurm", "activate.sh"):
        shutil.copy(ROOT / "slurm" / name, tmp_path)
    job = cluster.job("PT_CNN_DataParallel.slurm", cwd=tmp_path)
    assert job.exit_code == 5 and "2 GPUs, cuda:1" in job.log, job.log
    assert "simulated: 2 × V100-16GB" in job.log


# ---- each job file with its own script: make test-jobs --------------------------------------

# What the log of a lesson with --prove says; the other scripts are proved by `multigpu prove`.
PROVED = {
    "TF_CNN_MultiGPU": "fit on 2 replicas equals one device",
    "TF_CNN_CustomLoop": "custom loop on 2 replicas equals one device",
    "TF_CNN_MultiNode": "(2 workers on 2 nodes, started by srun)",
    "PT_CNN_Elastic": "4 ranks, 1 start, equal a run without a stop",
}
STANDALONE = ("SingleGPU", "DataParallel", "ModelParallel", "Pipeline", "DDPSpawn")
STANDALONE += ("MultiGPU", "HybridParallel")
TRAINERS = ("PTL_multiGPU", "PTL_Strategies", "PTL_Compressed", "PTL_Decentralized")
TRAINERS += ("PTL_NodeBatch", "PTL_Precision")
# The scripts of lessons 14 to 19, and the flags of each.
LARGE = {
    "PT_GPT_Memory": ("--epochs", 1),
    "PT_GPT_FSDP": ("--epochs", 1, "--group", 2),
    "PT_GPT_TensorParallel": ("--epochs", 1),
    "PT_GPT_Mesh": ("--epochs", 1, "--mesh", 2, 1, 1, 2),
    "PT_Clinic": ("--patient", "wrong", "--cured", "--timeout", 60),
    "PT_GPT_ContextExperts": ("--epochs", 1),
}
EACH_STEM = [*(f"PT_CNN_{name}" for name in STANDALONE), *TRAINERS, *PROVED, *LARGE]


def check_results(stem: str, log: str, out: Path) -> None:
    if stem in PROVED:
        assert PROVED[stem] in log, log
        # The elastic run is compared to the bit: its limit is 0.
        assert set(re.findall(r"limit (?:1e-05|0e\+00): (.+)", log)) == {"holds"}, log
    elif stem in LARGE:
        assert (out / "model.pt").exists(), log
        # Guessing one of 10 digits has 2.303, one of 17 grey levels 2.833.
        assert json.loads((out / "metrics.json").read_text())["loss"] < 2.3, log
    else:
        assert (out / "model.pt").exists(), log
        assert json.loads((out / "metrics.json").read_text())["accuracy"] > 0.5, log


def flags_of(stem: str, out: Path) -> list[object]:
    if stem in LARGE:
        return [*LARGE[stem], "--out", out]
    return ["--epochs", 1, "--out", out, *(["--prove"] if stem in PROVED else [])]


@on_cluster
@on_request
@pytest.mark.parametrize("stem", EACH_STEM)
def test_each_job(cluster, tmp_path: Path, stem: str):
    out = tmp_path / "out"
    job = cluster.job(
        f"--output={tmp_path}/log", f"slurm/{stem}.slurm", *flags_of(stem, out), cwd=ROOT
    )
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    check_results(stem, job.log, out)


def on_virtual_gpus(cluster, *sbatch: object, cwd: Path) -> subprocess.CompletedProcess:
    """Slurm passes the command's variables on to the job, on both nodes."""
    flags = ("--gpus", 2, "--gpus-per-node", 2, "--between-nodes", "Ethernet25")
    command = ("multigpu", "virtual", *flags, "sbatch", "--wait", *sbatch)
    return cluster.run(*command, cwd=cwd, timeout=300)


@on_cluster
@on_request
@pytest.mark.parametrize("stem", [stem for stem in EACH_STEM if not stem.startswith("TF")])
def test_each_job_on_virtual_gpus(cluster, tmp_path: Path, stem: str):
    out, log = tmp_path / "out", tmp_path / "log"
    job = (f"--output={log}", f"slurm/{stem}.slurm", *flags_of(stem, out))
    done = on_virtual_gpus(cluster, *job, cwd=ROOT)
    assert done.returncode == 0, log.read_text()
    check_results(stem, log.read_text(), out)
    assert "V100-16GB" in done.stderr and "cuda:0" in done.stderr, done.stderr


@on_cluster
@on_request
@pytest.mark.parametrize("way", ["torchrun", "one task per rank"])
def test_the_job_ends_with_the_loss_of_torchrun(way: str, cluster, tmp_path: Path):
    """The second way is the change that the job file's comment describes."""
    done = torchrun(4, SCRIPT, "--epochs", 3, "--out", tmp_path / "torchrun")
    assert done.returncode == 0, done.stdout
    path = ROOT / LESSON
    options = ()
    if way == "one task per rank":
        text, count = re.subn(r"(?m)^srun (.*\\\n)+.*\n", "", path.read_text())
        text, lines = re.subn(r"(?m)^#srun", "srun", text)
        assert (count, lines) == (1, 1)
        path = tmp_path / "job.slurm"
        path.write_text(text)
        options = ("--ntasks-per-node=2", "--cpus-per-task=1")
    job = cluster.job(
        *(
            f"--output={tmp_path}/log",
            *options,
            path,
            "--epochs",
            3,
            "--out",
            tmp_path / "job",
        ),
        cwd=ROOT,
    )
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    # The same four shards, reduced by the same gloo: only the order of a sum may differ.
    losses = [
        json.loads((tmp_path / name / "metrics.json").read_text())["loss"]
        for name in ("torchrun", "job")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-6)


@on_cluster
@on_request
@pytest.mark.parametrize("virtual", [False, True], ids=["CPUs", "virtual GPUs"])
def test_an_array_measures_a_scaling_curve(virtual: bool, cluster, root: Path, npz):
    """One task for each number of ranks; the last one to end draws all points."""
    shutil.copy(ROOT / "scripts/PT_CNN_Scaling.py", root / "scripts")
    job = ("slurm/PT_CNN_Scaling.slurm", "--data", npz(), "--epochs", 2, "--batch-size", 8)
    if virtual:
        done = on_virtual_gpus(cluster, *job, cwd=root)
        assert done.returncode == 0
        # The report has each task of the array as a start of its own.
        lanes = set(re.findall(r"^(start \d, rank \d), cuda", done.stderr, re.MULTILINE))
        assert len(lanes) == 1 + 2 + 4, done.stderr
    else:
        cluster.wait_for_tasks(cluster.submit(*job, cwd=root), 240)
    logs = [log.read_text() for log in sorted(root.glob("PT_CNN_Scaling-*.out"))]
    assert len(logs) == 3
    for log, ranks in zip(logs, (1, 2, 4), strict=True):
        device = "cuda" if virtual else "cpu"
        assert f"{ranks} × {device}, 8 images a step (strong scaling)" in log, log
    assert any("by ranks: 1: 1.00×, 2: " in log and ", 4: " in log for log in logs), logs
    (folder,) = (root / "results").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "4", "scaling.png"]
