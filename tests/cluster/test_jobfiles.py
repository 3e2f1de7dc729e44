"""The job files do what their comments say, on a real Slurm."""

import json
import os
import re
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest
from cluster import wait_until
from commands import ROOT, SCRIPT, clean_environment, torchrun

from multigpu.course import LESSONS

pytestmark = pytest.mark.classroom
on_request = pytest.mark.skipif("ALL_JOBS" not in os.environ, reason="make test-jobs runs it")

JOB_FILES = sorted((ROOT / "slurm").glob("*.slurm"))
LESSON = "slurm/PT_CNN_MultiGPU.slurm"

# Replaces the lesson's script where only the launch is tested: it prints where it runs, then
# fails or sleeps as its flags say.
STAND_IN = """
import os, sys, time
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
names = ("WORLD_SIZE", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
values = [f"{name}={os.environ.get(name)}" for name in names]
line = " ".join(["rank", rank, *values, str(sys.argv[1:])])
# One write, so that no other rank writes in between.
os.write(1, (line + chr(10)).encode())
open("up-" + rank, "w").close()
if "--all-fail" in sys.argv:
    sys.exit(5)
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
    """A repository's root with the real job files and STAND_IN as the lesson's script."""
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/PT_CNN_MultiGPU.py").write_text(STAND_IN)
    return tmp_path


def one_task_per_rank(text: str) -> str:
    """The job file after the changes that its comment describes for one task per rank."""
    text, tasks = re.subn(r"(?m)^(#SBATCH --ntasks-per-node=)1", r"\g<1>2", text)
    text, cores = re.subn(r"(?m)^(#SBATCH --cpus-per-task=)2", r"\g<1>1", text)
    text, command = re.subn(
        r'(?ms)^"\$\{step\[@\]\}" --ntasks-per-node.*?--out "\$out" "\$@"\n', "", text
    )
    text, lines = re.subn(r'(?m)^#(export MASTER_ADDR|"\$\{step)', r"\1", text)
    assert (tasks, cores, command, lines) == (1, 1, 1, 2)
    return text


def ranks(log: str) -> list[list[str]]:
    return sorted(line.split() for line in log.splitlines() if line.startswith("rank "))


# ---- what is written in them ----------------------------------------------------------------


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_every_sbatch_line_is_valid_and_commented_on(path: Path, cluster):
    lines = path.read_text().splitlines()
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
    almost = [
        line
        for line in lines
        if re.match(r"#\s*SBATCH", line) and not line.startswith("#SBATCH ")
    ]
    assert not almost, "sbatch ignores these"
    tried = cluster.run("sbatch", "--test-only", path, cwd=ROOT)
    assert tried.returncode == 0 and "to start at" in tried.stderr, tried.stderr
    assert subprocess.run(["bash", "-n", path]).returncode == 0


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_what_a_job_file_runs_exists(path: Path):
    text = path.read_text()
    for script in re.findall(r"scripts/\w+\.py", text):
        assert (ROOT / script).exists(), script
    assert "source slurm/activate.sh || exit" in text
    assert "SBATCH_ACCOUNT" in text and "SBATCH_PARTITION" in text


SEVERAL_RANKS = [
    path for path in JOB_FILES if "srun --export=ALL --kill-on-bad-exit" in path.read_text()
]


@pytest.mark.parametrize("path", SEVERAL_RANKS, ids=lambda path: path.name)
def test_a_job_of_several_ranks_keeps_a_preset_address(path: Path):
    """And has a commented line that chooses NCCL's network."""
    text = path.read_text()
    assert re.search(r"(?m)^\w+=\$\{MASTER_ADDR:-\$\(", text)
    assert re.search(r"(?m)^#export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=\w+$", text)


def test_each_notebook_has_a_job_file():
    """PT_CNN_ElasticNode, whose ranks are on several jobs, and Signals come in addition."""
    stems = {notebook.stem for lesson in LESSONS for notebook in lesson.notebooks}
    assert {path.stem for path in JOB_FILES} == stems | {"PT_CNN_ElasticNode", "Signals"}


def test_there_are_twelve_jobs_of_several_ranks():
    assert len(SEVERAL_RANKS) == 12


@pytest.mark.parametrize("stem", ["TF_CNN_MultiGPU", "TF_CNN_CustomLoop", "TF_CNN_MultiNode"])
def test_a_tensorflow_job_says_how_to_install_its_gpu_build(stem: str):
    """By `make`, and with the name that pyproject.toml gives to the extra packages."""
    text = (ROOT / f"slurm/{stem}.slurm").read_text()
    (extra,) = re.findall(r"make install VENV=\S+ .*'\.\[([\w-]+)\]'", text)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any("and-cuda" in name for name in packages["optional-dependencies"][extra])
    assert re.search(rf"COURSE_ENV=\S+ sbatch slurm/{stem}\.slurm", text)


# ---- the lesson's job -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("torchrun")
    done = torchrun(4, SCRIPT, "--epochs", 3, "--out", out)
    assert done.returncode == 0, done.stdout
    return losses(out)


def losses(out: Path) -> list[float]:
    return [
        epoch["loss"] for epoch in json.loads((out / "metrics.json").read_text())["epochs"]
    ]


@pytest.mark.parametrize("way", ["torchrun", "one task per rank"])
def test_the_job_ends_with_the_loss_of_torchrun_with_four_processes(
    way: str, cluster, by_torchrun, tmp_path: Path
):
    path = ROOT / LESSON
    if way == "one task per rank":
        path = tmp_path / "job.slurm"
        path.write_text(one_task_per_rank((ROOT / LESSON).read_text()))
    job = cluster.job(
        f"--output={tmp_path}/log", path, "--epochs", 3, "--out", tmp_path / "out", cwd=ROOT
    )
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert "4 ranks on 2 nodes" in job.log
    # The same four shards, reduced by the same gloo: only the order of a sum may differ.
    assert losses(tmp_path / "out") == pytest.approx(by_torchrun, rel=0, abs=1e-6)


def run_on_virtual_gpus(cluster, folder: Path, job: object, epochs: int) -> tuple[str, str]:
    """Run a job on two nodes with two virtual GPUs each; return its log and the report."""
    flags = ("--gpus", 2, "--gpus-per-node", 2, "--between-nodes", "Ethernet25")
    sbatch = ("sbatch", "--wait", f"--output={folder}/log", job)
    more = ("--epochs", epochs, "--prove", "--out", folder / "out")
    done = cluster.run("multigpu", "virtual", *flags, *sbatch, *more, cwd=ROOT, timeout=240)
    log = (folder / "log").read_text()
    assert done.returncode == 0, log
    verdicts = re.findall(r"limit \S+: (.+)", log)
    assert set(verdicts) == {"holds"}, log
    return log, done.stderr


def test_a_job_on_virtual_gpus(cluster, tmp_path: Path):
    """Slurm passes the command's variables on to the job, on both nodes."""
    log, report = run_on_virtual_gpus(cluster, tmp_path, LESSON, epochs=2)
    assert "device: 4 × V100-16GB (virtual), nccl (4 ranks on 2 nodes" in log
    assert "proof: DDP on 4 ranks equals one process: " in log
    assert "rank 3, cuda:1" in report, report


@on_request
@pytest.mark.parametrize(
    ("stem", "words"),
    [
        ("PT_CNN_DataParallel", "DataParallel on 2 GPUs equals one process"),
        ("PT_CNN_ModelParallel", "two halves on two GPUs equal one process"),
        ("PT_CNN_Pipeline", "1f1b with 2 stages equals one process"),
        ("PT_CNN_DDPSpawn", "DDP on 2 spawned ranks equals one process"),
        ("PTL_multiGPU", "the Trainer on 4 ranks equals one process"),
        ("PT_CNN_SingleGPU", "started by python"),
        ("PT_CNN_HybridParallel", "2 ranks on 2 nodes, started by srun"),
        ("PT_CNN_Elastic", "4 ranks, 1 start, equal a run without a stop"),
        ("PTL_Precision", "strategy: ddp, since srun has started 2 ranks"),
        ("PTL_Strategies", "compared with serial: ddp, horovod, bagua:gradient_allreduce"),
        ("PTL_Compressed", "ddp equals one process"),
        ("PTL_Decentralized", "ddp equals one process"),
        ("PTL_NodeBatch", "ddp2 on 2 × 2 cuda"),
    ],
)
def test_the_other_jobs_on_virtual_gpus(cluster, tmp_path: Path, stem: str, words: str):
    log, report = run_on_virtual_gpus(cluster, tmp_path, f"slurm/{stem}.slurm", epochs=1)
    assert words in log, log
    assert "V100-16GB" in report and "cuda:0" in report, report


@on_request
def test_an_array_on_virtual_gpus(cluster, root: Path, npz):
    """The report has each task of the array as a start of its own."""
    shutil.copy(ROOT / "scripts/PT_CNN_Scaling.py", root / "scripts")
    flags = ("--gpus", 2, "--gpus-per-node", 2, "--between-nodes", "Ethernet25")
    sbatch = ("sbatch", "--wait", "--output=log-%a", "slurm/PT_CNN_Scaling.slurm")
    more = ("--data", npz(), "--epochs", 1, "--batch-size", 8, "--prove")
    done = cluster.run("multigpu", "virtual", *flags, *sbatch, *more, cwd=root, timeout=300)
    logs = [log.read_text() for log in sorted(root.glob("log-*"))]
    assert done.returncode == 0 and len(logs) == 3, logs
    for log, ranks_of_task in zip(logs, (1, 2, 4), strict=True):
        assert f"device: {ranks_of_task} × V100-16GB (virtual), nccl" in log
        assert "limit 1e-05: holds" in log
    lanes = set(re.findall(r"^(start \d, rank \d), cuda", done.stderr, re.MULTILINE))
    assert len(lanes) == 1 + 2 + 4, done.stderr


# One job for each way to start a lesson's processes; the others start in one of these ways.
OTHER_JOBS = [
    ("PT_CNN_SingleGPU", "1 rank on 1 node, started by python"),
    ("PT_CNN_Pipeline", "2 ranks on 2 nodes, started by srun"),
    ("PT_CNN_DDPSpawn", "2 ranks on 1 node, started by mp.spawn"),
    ("TF_CNN_MultiNode", "(2 workers on 2 nodes, started by srun)"),
    ("PT_CNN_Elastic", "4 ranks, 1 start, equal a run without a stop"),
    ("PTL_multiGPU", "the Trainer on 4 ranks equals one process"),
    *(
        pytest.param(*job, marks=on_request)
        for job in (
            ("PT_CNN_DataParallel", "devices: vgpu:0, vgpu:1"),
            ("PT_CNN_ModelParallel", "global batch 64 = 4 ("),
            ("PT_CNN_HybridParallel", "(2 ranks on 2 nodes, started by srun)"),
            ("TF_CNN_MultiGPU", "fit on 2 replicas equals one device"),
            ("TF_CNN_CustomLoop", "custom loop on 2 replicas equals one device"),
            ("PTL_Precision", "strategy ddp, precision 32-true, global batch 64"),
            ("PTL_Strategies", "compared with serial: ddp, horovod, bagua:gradient_allreduce"),
            ("PTL_Compressed", "ddp equals one process"),
            ("PTL_Decentralized", "ddp equals one process"),
            ("PTL_NodeBatch", "ddp2 on 2 × 2 vgpu"),
        )
    ),
]


@pytest.mark.parametrize(("stem", "words"), OTHER_JOBS)
def test_the_other_lessons_jobs(cluster, tmp_path: Path, stem: str, words: str):
    path = f"slurm/{stem}.slurm"
    out = tmp_path / "out"
    job = cluster.job(
        f"--output={tmp_path}/log", path, "--epochs", 1, "--prove", "--out", out, cwd=ROOT
    )
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    # The elastic run is compared to the bit: its limit is 0.
    assert words in job.log, job.log
    assert re.search(r"limit (1e-05|0e\+00): holds", job.log), job.log


def test_an_array_measures_a_scaling_curve(cluster, root: Path, npz):
    """One task for each number of ranks; the last one to end draws all points."""
    shutil.copy(ROOT / "scripts/PT_CNN_Scaling.py", root / "scripts")
    flags = ("--data", npz(), "--epochs", 2, "--batch-size", 8, "--prove")
    number = cluster.submit("slurm/PT_CNN_Scaling.slurm", *flags, cwd=root)
    cluster.wait_for_tasks(number, 240)
    logs = [log.read_text() for log in sorted(root.glob(f"PT_CNN_Scaling-{number}_*.out"))]
    assert len(logs) == 3
    starts = ("1 rank on 1 node", "2 ranks on 1 node", "4 ranks on 2 nodes")
    for log, words in zip(logs, starts, strict=True):
        assert words in log and "limit 1e-05: holds" in log, log
    assert any("by ranks: 1: 1.00×, 2: " in log and ", 4: " in log for log in logs), logs
    folder = root / f"results/PT_CNN_Scaling-{number}"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "4", "scaling.png"]


def test_sbatch_wait_reports_success_and_the_log_name(cluster, root: Path):
    done = cluster.run("sbatch", "--wait", LESSON, "--epochs", "3", cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    number = done.stdout.split()[-1]
    log = (root / f"PT_CNN_MultiGPU-{number}.out").read_text()
    assert f"rendezvous: 127.0.0.1:{15000 + int(number) % 10000}\n" in log
    assert [line[1:3] for line in ranks(log)] == [
        [str(rank), "WORLD_SIZE=4"] for rank in range(4)
    ], log
    assert sorted(line[3] for line in ranks(log)) == [
        f"SLURMD_NODENAME={node}" for node in ("n1", "n1", "n2", "n2")
    ]
    assert {tuple(line[4:6]) for line in ranks(log)} == {
        ("CUDA_VISIBLE_DEVICES=0,1", "OMP_NUM_THREADS=1")
    }
    assert f"['--out', 'results/PT_CNN_MultiGPU-{number}', '--epochs', '3']" in log, (
        "flags after the file's name"
    )


def test_sizes_can_be_changed_on_the_command_line(cluster, root: Path):
    job = cluster.job("--nodes=1", "--gpus-per-node=1", "--cpus-per-task=3", LESSON, cwd=root)
    assert [line[:3] for line in ranks(job.log)] == [["rank", "0", "WORLD_SIZE=1"]], job.log
    assert "OMP_NUM_THREADS=3" in job.log


def test_a_site_that_requires_gres(cluster, root: Path):
    path = root / LESSON
    path.write_text(path.read_text().replace("--gpus-per-node=2 ", "--gres=gpu:2 "))
    job = cluster.job(LESSON, cwd=root)
    assert len(ranks(job.log)) == 4 and "--gres" in path.read_text(), job.log


def test_a_preset_address_is_used(cluster, root: Path):
    """By torchrun, and by the ranks of srun; here the address has another name."""
    job = cluster.job("--export=ALL,MASTER_ADDR=localhost", LESSON, cwd=root)
    assert "rendezvous: localhost:" in job.log and len(ranks(job.log)) == 4, job.log
    (root / "scripts/PTL_multiGPU.py").write_text(
        "import os\nprint('address', os.environ['MASTER_ADDR'])\n"
    )
    job = cluster.job(
        "--export=ALL,MASTER_ADDR=localhost", "slurm/PTL_multiGPU.slurm", cwd=root
    )
    assert job.log.count("address localhost") == 4, job.log


def test_account_and_partition_of_the_shell(cluster, root: Path):
    """sbatch reads both variables; a partition that does not exist is refused."""
    number = cluster.submit(LESSON, cwd=root, SBATCH_PARTITION="classroom", SBATCH_ACCOUNT="a")
    assert cluster.wait(number).exit_code == 0
    done = cluster.run("sbatch", LESSON, cwd=root, SBATCH_PARTITION="elsewhere")
    assert done.returncode != 0 and "partition" in done.stderr


def test_an_array_over_learning_rates(cluster, root: Path):
    """After the change that the job file's comment describes."""
    path = root / "slurm/PT_CNN_SingleGPU.slurm"
    text, lines = re.subn(r"(?m)^#(rates=|set -- --lr)", r"\1", path.read_text())
    assert lines == 2
    path.write_text(text)
    (root / "scripts/PT_CNN_SingleGPU.py").write_text("import sys\nprint('flags', sys.argv)\n")
    number = cluster.submit("--array=0-2", path, "--epochs", 1, cwd=root)
    wait_until(lambda: len(list(root.glob("PT_CNN_SingleGPU-*.out"))) == 3)
    cluster.wait_for_tasks(number)
    logs = [log.read_text() for log in root.glob("PT_CNN_SingleGPU-*.out")]
    found = sorted(
        re.search(r"results/\S+', '--lr', '(\S+)', '--epochs', '1'", log)[1] for log in logs
    )
    assert found == ["0.01", "0.05", "0.1"], logs
    folders = {re.search(r"results/PT_CNN_SingleGPU-\d+", log)[0] for log in logs}
    assert len(folders) == 3, "each task has its own folder"


def test_a_port_in_use_is_skipped(cluster, root: Path):
    number = cluster.submit("--hold", LESSON, cwd=root)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 15000 + number % 10000))
        other.listen()
        assert cluster.run("scontrol", "release", number).returncode == 0
        job = cluster.wait(number)
    assert job.exit_code == 0 and len(ranks(job.log)) == 4, job.log
    assert f"rendezvous: 127.0.0.1:{15001 + number % 10000}\n" in job.log


# ---- when it goes wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("way", ["torchrun", "one task per rank"])
def test_a_rank_that_dies_ends_the_job_at_once(way: str, cluster, root: Path):
    path = root / LESSON
    if way == "one task per rank":
        path.write_text(one_task_per_rank(path.read_text()))
    # The other ranks would sleep for ten minutes.
    job = cluster.job(LESSON, "--one-dies", cwd=root, timeout=90)
    assert job.state == "FAILED" and job.exit_code != 0, job.log
    assert len(ranks(job.log)) == 4


@pytest.mark.parametrize("way, code", [("torchrun", 1), ("one task per rank", 5)])
def test_a_script_that_fails_fails_the_job(way: str, code: int, cluster, root: Path):
    path = root / LESSON
    if way == "one task per rank":
        path.write_text(one_task_per_rank(path.read_text()))
    job = cluster.job(LESSON, "--all-fail", cwd=root)
    # 143 if srun, after the first failure, ended another task before it failed by itself.
    assert job.state == "FAILED" and job.exit_code in (code, 143), job.log


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_started_without_slurm(path: Path):
    done = subprocess.run(
        ["bash", path], env=clean_environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"sbatch slurm/{path.name}" in done.stderr


def test_an_option_of_sbatch_after_the_files_name(cluster, tmp_path: Path):
    job = cluster.job(
        f"--output={tmp_path}/log", "slurm/PT_CNN_SingleGPU.slurm", "--nodes=2", cwd=ROOT
    )
    assert job.exit_code == 2, job.log
    assert "options of sbatch go before the job file's name" in job.log


def test_submitted_from_elsewhere(cluster, root: Path):
    job = cluster.job(root / LESSON, cwd=root / "slurm")
    assert job.exit_code == 2
    (message,) = job.log.splitlines()
    assert message.startswith(f"error: {root}/slurm is not the repository's root")
    assert f"sbatch {LESSON}" in message


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_a_job_without_gpus(cluster, tmp_path: Path, path: Path):
    one = ("--array=0",) if "#SBATCH --array" in path.read_text() else ()
    job = cluster.job(f"--output={tmp_path}/log", "--gpus-per-node=0", *one, path, cwd=ROOT)
    assert (job.exit_code, job.log.count("\n")) == (2, 1), job.log
    assert job.log.startswith("error: Slurm gave this job no GPU")


@pytest.mark.parametrize("way", ["torchrun", "one task per rank"])
def test_the_log_of_a_cancelled_job_ends_with_slurms_own_lines(way: str, cluster, root: Path):
    """torchrun alone adds two stack traces of its SignalException, 75 lines."""
    path = root / LESSON
    if way == "one task per rank":
        path.write_text(one_task_per_rank(path.read_text()))
    number = cluster.submit(LESSON, "--sleep", cwd=root)
    wait_until(lambda: len(list(root.glob("up-*"))) == 4, 60)
    assert cluster.run("scancel", number).returncode == 0
    job = cluster.wait(number, timeout=60)
    assert job.state == "CANCELLED" and "CANCELLED AT" in job.log
    assert "Traceback" not in job.log and "SignalException" not in job.log, job.log
    after = job.log[job.log.rindex("rank ") :].splitlines()
    assert len(after) < 15, job.log


def test_more_tasks_than_torchrun_needs(cluster, root: Path):
    """One torchrun per node, with any --ntasks-per-node on the command line."""
    job = cluster.job("--ntasks-per-node=2", LESSON, cwd=root)
    assert [line[2] for line in ranks(job.log)] == ["WORLD_SIZE=4"] * 4, job.log
    assert job.log.count("OMP_NUM_THREADS=1 ") == 4, (
        "torchrun's task has two cores, for two ranks"
    )


def test_a_site_that_exports_nothing(cluster, root: Path):
    job = cluster.job(f"--export=COURSE_ENV={ROOT}/.venv", LESSON, cwd=root)
    assert len(ranks(job.log)) == 4, job.log


def test_one_torchrun_gets_is_host(cluster, root: Path):
    """torchrun guesses from names and addresses, wrongly if a node's name is 127.0.1.1."""
    (root / "bin").mkdir()
    (root / "bin/torchrun").write_text('#!/bin/sh\necho "rank $SLURM_NODEID $*"\n')
    (root / "bin/torchrun").chmod(0o755)
    path = root / LESSON
    path.write_text(
        path.read_text().replace("\nstep=", f"\nexport PATH={root}/bin:$PATH\nstep=")
    )
    job = cluster.job(LESSON, cwd=root)
    assert [[line[1], line[3]] for line in ranks(job.log)] == [
        ["0", "--rdzv-conf=is_host=1,read_timeout=300"],
        ["1", "--rdzv-conf=is_host=0,read_timeout=300"],
    ], job.log
