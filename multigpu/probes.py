"""What is on this machine? One function a thing to look at; multigpu.doctor says which of them matter and why.

A probe gives a Found. It may raise: the doctor makes that a result. What it starts is bounded in time.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

OK, WARN, MISSING = "ok", "warn", "missing"
GIB = 2**30
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
TORCH_FROM, TORCH_BELOW = (2, 11), (2, 14)  # pyproject.toml says the same
SECONDS = 4  # for a small command
TORCH_SECONDS = 20  # a first import from a network file system is slow

# Facts come in two lines, so that the first is there even if gloo hangs, which looks up the host's name.
TORCH_PROBE = """
import json, torch
import torch.distributed as dist
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": []}
for i in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(i)
    facts["gpus"].append({"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)})
there = dist.is_available()
facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if there and dist.is_nccl_available() else None
facts["mpi"] = there and dist.is_mpi_available()
facts["gloo"] = None if there and dist.is_gloo_available() else "this torch was built without it"
print(json.dumps(facts | {"gloo": facts["gloo"] or "no answer"}), flush=True)
if facts["gloo"] is None:
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        facts["gloo"] = str(error) or type(error).__name__
print(json.dumps(facts), flush=True)
"""


@dataclass
class Found:
    """What a probe found: ok, warn or missing; one line of text; what to do ('' if nothing); numbers and versions."""

    status: str
    text: str
    fix: str = ""
    details: dict[str, object] = field(default_factory=dict)


def ask(*command: str, seconds: float = SECONDS) -> tuple[int | None, str, str]:
    """Run a command; give its exit code, stdout and stderr. The code is None if it did not end, or could not start."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return None, "", f"{error.filename or command[0]}: {error.strerror}"  # without /dev/null, it is that
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):  # it may have ended just now
            os.killpg(process.pid, signal.SIGKILL)
    try:  # a process that hangs in a driver survives even SIGKILL: then go on without it
        out = process.communicate(timeout=1)[0]
    except subprocess.TimeoutExpired:
        out = ""
    return None, out, f"no answer in {seconds:g} s"


def find(program: str) -> str | None:
    """Give a program's path; the daemons lie in folders that an ordinary user's PATH may lack."""
    return shutil.which(program) or shutil.which(program, path=SBIN)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def cgroup(name: str) -> str:
    """Read a limit of the container or job that this process is in; '' where there is none."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


# ---- the machine -------------------------------------------------------------------------------------------------


def python() -> Found:
    # No comparison: this package cannot be installed under an older Python than it wants.
    version = ".".join(map(str, sys.version_info[:3]))
    return Found(OK, version, details={"version": version})


def cpu() -> Found:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = max(1, min(cores, int(quota) // int(period)))
    if cores == 1:
        return Found(WARN, "1 core", "two ranks work, but take turns: expect no speed-up", {"cores": 1})
    return Found(OK, f"{cores} cores", details={"cores": cores})


def memory() -> Found:
    try:
        pairs = re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        sizes = {key: int(value) * 1024 for key, value in pairs}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError):  # not Linux
        total, free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        if (limit := cgroup(name)).isdigit():
            total = min(total, int(limit))
    free = None if free is None else min(free, total)
    details = {"total_gib": round(total / GIB, 1), "available_gib": None if free is None else round(free / GIB, 1)}
    text = f"{total / GIB:.1f} GiB" + ("" if free is None else f", {free / GIB:.1f} GiB of it available")
    if (total if free is None else free) < 2 * GIB:
        return Found(WARN, text, "close other programs, or use two ranks at most", details)
    return Found(OK, text, details=details)


def shm() -> Found:
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return Found(MISSING, f"there is no {folder}", "keep DataLoader at num_workers=0")
    usage = shutil.disk_usage(folder)
    details = {"total_gib": round(usage.total / GIB, 2), "free_gib": round(usage.free / GIB, 2)}
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    if not os.access(folder, os.W_OK):
        return Found(WARN, f"{text}, but not writable", f"sudo chmod 1777 {folder}", details)
    if usage.free < GIB:
        return Found(WARN, text, f"sudo mount -o remount,size=4G {folder}; in docker: run --shm-size=4g", details)
    return Found(OK, text, details=details)


def files() -> Found:
    import resource  # POSIX only

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    text = f"{soft or 'unlimited'}, can be raised to {hard or 'any number'}"
    details = {"soft": soft, "hard": hard}
    if soft is not None and soft < 1024:
        return Found(WARN, text, "ulimit -n 4096" if not hard or hard >= 4096 else "ask for a higher limit", details)
    return Found(OK, text, details=details)


def port() -> Found:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(SECONDS)
        client.connect(server.getsockname())
    with socket.socket() as usual:
        usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            usual.bind(("127.0.0.1", 29500))
            free = True
        except OSError:
            free = False
    text = "the loopback works; 29500, torchrun's usual port, is " + ("free" if free else "taken: give another one")
    return Found(OK, text, details={"loopback": True, "port_29500_free": free})


# ---- torch, seen by a process of its own -------------------------------------------------------------------------


def torch_facts() -> dict[str, object]:
    """Import torch in another process and ask it; {"error": …} if that fails or takes too long."""
    code, out, err = ask(sys.executable, "-P", "-W", "ignore", "-c", TORCH_PROBE, seconds=TORCH_SECONDS)
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {"error": last_line(err) or f"exit code {code}"}


def torch(facts: dict) -> Found:
    if "error" in facts:
        return Found(MISSING, facts["error"], f"{sys.executable} -m pip install 'torch>=2.11,<2.14'")
    details = {key: facts[key] for key in ("version", "cuda", "hip")}
    numbers = tuple(int(part) for part in re.findall(r"\d+", facts["version"])[:2])
    wanted = "{}.{} to below {}.{}".format(*TORCH_FROM, *TORCH_BELOW)
    if TORCH_FROM <= numbers < TORCH_BELOW:
        return Found(OK, facts["version"], details=details)
    status = MISSING if numbers < TORCH_FROM else WARN  # a newer one is untried, an older one lacks what we call
    fix = f"{sys.executable} -m pip install 'torch>=2.11,<2.14'"
    return Found(status, f"{facts['version']}; the course is tried with {wanted}", fix, details)


def gpu(facts: dict) -> Found:
    gpus = facts.get("gpus", [])
    if gpus:
        text = ", ".join(f"{gpu['name']} ({gpu['memory_gib']:g} GiB)" for gpu in gpus)
        return Found(OK, f"{len(gpus)}: {text}", details={"count": len(gpus), "devices": gpus})
    details = {"count": 0, "devices": []}
    code, out, _ = ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    seen = [line for line in out.splitlines() if line.strip()] if code == 0 else []
    if not seen:
        fix = "on a cluster, ask Slurm for some: --gres=gpu:2"
        return Found(MISSING, "none: the lessons run on CPU processes", fix, details)
    fix = "see that CUDA_VISIBLE_DEVICES does not hide them, and that the driver is new enough for torch's CUDA"
    if facts.get("cuda") is None:
        fix = "install torch's CUDA build: this one is for CPUs"
    return Found(WARN, f"nvidia-smi sees {len(seen)} ({seen[0]}), torch sees none", fix, details)


def gloo(facts: dict) -> Found:
    problem = facts.get("error") or facts.get("gloo")
    if problem is None:
        return Found(OK, "an all-reduce went through", details={"works": True})
    fix = "if the host's name cannot be resolved, add it to /etc/hosts; else install torch anew"
    return Found(MISSING, first_line(problem), fix, {"works": False})


def nccl(facts: dict) -> Found:
    if version := facts.get("nccl"):
        return Found(OK, version, details={"version": version})
    return Found(MISSING, "not in this torch; without GPUs nothing needs it", "with GPUs: install torch's CUDA build")


def torch_mpi(facts: dict) -> Found:
    if facts.get("mpi"):
        return Found(OK, "built in", details={"built_in": True})
    return Found(MISSING, "not in this torch: use gloo or NCCL", details={"built_in": False})


# ---- other programs ----------------------------------------------------------------------------------------------


def tensorflow() -> Found:
    versions = {}
    for name in ("tensorflow", "tensorflow-cpu", "keras"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    version, keras = versions.get("tensorflow") or versions.get("tensorflow-cpu"), versions.get("keras")
    details = {"version": version, "keras": keras}
    if version is None:
        return Found(MISSING, "not installed", f"{sys.executable} -m pip install tensorflow", details)
    return Found(OK, f"{version}, Keras {keras or 'missing'}", details=details)


def slurm() -> Found:
    details: dict[str, object] = {name: find(name) for name in ("sbatch", "slurmctld", "slurmd", "munged")}
    there = [name for name, path in details.items() if path]
    lacking = [name for name, path in details.items() if not path]
    if not there:
        return Found(MISSING, "not installed", "multigpu slurm install", details)
    version = _slurm_version(details["slurmctld"] or details["sbatch"])
    details["version"] = version
    said = f"{version or 'unknown version'}: "
    if not lacking:
        return Found(OK, said + ", ".join(there), details=details)
    if there in (["sbatch"], ["sbatch", "munged"]):
        return Found(OK, said + "sbatch, for a cluster elsewhere; no classroom cluster here", details=details)
    return Found(WARN, f"{', '.join(there)}, but no {', '.join(lacking)}", "multigpu slurm install", details)


def _slurm_version(program: object) -> str | None:
    """The daemon says it at once; Debian's sbatch first wants a slurm.conf."""
    found = re.search(r"\d+\.\d+[\w.]*", ask(str(program), "-V")[1])
    return found and found.group()


def mpi() -> Found:
    path = shutil.which("mpirun")
    if path is None:
        return Found(MISSING, "no mpirun", "sudo apt-get install openmpi-bin", {"mpirun": None})
    code, out, err = ask(path, "--version")
    known = {"open mpi": "openmpi", "openrte": "openmpi", "intel": "intel", "hydra": "mpich", "mpich": "mpich"}
    flavour = next((name for mark, name in known.items() if mark in out.lower()), None)
    number = re.search(r"\d+\.\d+[\w.]*", out)
    details = {"flavour": flavour, "version": number and number.group(), "mpirun": path}
    if code != 0:
        problem = first_line(err) or first_line(out) or f"exit code {code}"
        return Found(WARN, f"mpirun fails: {problem}", "sudo apt-get install openmpi-bin", details)
    return Found(OK, f"{flavour or 'unknown kind'} {details['version'] or ''}".strip(), details=details)


def sandbox() -> Found:
    path = shutil.which("bwrap")
    if path is None:
        return Found(MISSING, "no bubblewrap", "sudo apt-get install bubblewrap", {"bwrap": None, "works": False})
    walls = "--unshare-all --die-with-parent --new-session --cap-drop ALL --ro-bind / / --dev /dev --proc /proc"
    code, _, err = ask(path, *walls.split(), "--tmpfs", "/tmp", "true")
    if code == 0:
        return Found(OK, "bubblewrap works", details={"bwrap": path, "works": True})
    fix = "allow user namespaces: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0; in docker: --privileged"
    return Found(WARN, f"bubblewrap fails: {first_line(err)}", fix, {"bwrap": path, "works": False})


def netns() -> Found:
    space = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    code, _, err = ask(*space, "true")
    if code != 0:
        details = {"works": False, "slow_link": False}
        return Found(MISSING, first_line(err) or f"exit code {code}", "needs root, or user namespaces", details)
    tc = find("tc")
    if tc is None:
        return Found(WARN, "they work, but no tc", "sudo apt-get install iproute2", {"works": True, "slow_link": False})
    slow = ("tbf", "rate", "100mbit", "burst", "32kbit", "latency", "400ms")
    code, _, err = ask(*space, tc, "qdisc", "add", "dev", "lo", "root", *slow)
    if code != 0:
        fix = "load the kernel's module: sudo modprobe sch_tbf"
        return Found(WARN, f"they work, but no slow link: {first_line(err)}", fix, {"works": True, "slow_link": False})
    return Found(OK, "they work, and so do slow links (tc tbf)", details={"works": True, "slow_link": True})
