"""What is installed on this machine, and does it work? One function a program, as in probes.py."""

import importlib.metadata
import json
import os
import re
import shutil
import sys

from multigpu.cli.doctor.machine import (
    MISSING,
    OK,
    WARN,
    Found,
    ask,
    find,
    first_line,
    last_line,
)

TORCH_FROM, TORCH_BELOW = (2, 11), (2, 14)  # pyproject.toml says the same
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


# ---- torch, seen by a process of its own -------------------------------------------------------------------------


def torch_facts() -> dict[str, object]:
    """Import torch in another process and ask it; {"error": …} if that fails or takes too long."""
    code, out, err = ask(
        sys.executable, "-P", "-W", "ignore", "-c", TORCH_PROBE, seconds=TORCH_SECONDS
    )
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {"error": last_line(err) or f"exit code {code}"}


def torch(facts: dict) -> Found:
    if "error" in facts:
        return Found(
            MISSING, facts["error"], f"{sys.executable} -m pip install 'torch>=2.11,<2.14'"
        )
    details = {key: facts[key] for key in ("version", "cuda", "hip")}
    numbers = tuple(int(part) for part in re.findall(r"\d+", facts["version"])[:2])
    wanted = "{}.{} to below {}.{}".format(*TORCH_FROM, *TORCH_BELOW)
    if TORCH_FROM <= numbers < TORCH_BELOW:
        return Found(OK, facts["version"], details=details)
    status = (
        MISSING if numbers < TORCH_FROM else WARN
    )  # a newer one is untried, an older one lacks what we call
    fix = f"{sys.executable} -m pip install 'torch>=2.11,<2.14'"
    return Found(
        status, f"{facts['version']}; the course is tried with {wanted}", fix, details
    )


def gpu(facts: dict) -> Found:
    gpus = facts.get("gpus", [])
    if gpus:
        text = ", ".join(f"{gpu['name']} ({gpu['memory_gib']:g} GiB)" for gpu in gpus)
        return Found(OK, f"{len(gpus)}: {text}", details={"count": len(gpus), "devices": gpus})
    details = {"count": 0, "devices": []}
    code, out, _ = ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    seen = [line for line in out.splitlines() if line.strip()] if code == 0 else []
    if not seen:
        fix = "nothing, unless you want some: on a cluster, ask Slurm with --gpus-per-node=2"
        return Found(MISSING, "none: the lessons run on CPU processes", fix, details)
    fix = "see that CUDA_VISIBLE_DEVICES does not hide them, and that the driver is new enough for torch's CUDA"
    if facts.get("cuda") is None:
        fix = "install torch's CUDA build: this one is for CPUs"
    return Found(
        WARN, f"nvidia-smi sees {len(seen)} ({seen[0]}), torch sees none", fix, details
    )


def gloo(facts: dict) -> Found:
    problem = facts.get("error") or facts.get("gloo")
    if problem is None:
        return Found(OK, "an all-reduce went through", details={"works": True})
    fix = (
        "if the host's name cannot be resolved, add it to /etc/hosts; else install torch anew"
    )
    return Found(MISSING, first_line(problem), fix, {"works": False})


def nccl(facts: dict) -> Found:
    if version := facts.get("nccl"):
        return Found(OK, version, details={"version": version})
    return Found(
        MISSING,
        "not in this torch; without GPUs nothing needs it",
        "with GPUs: install torch's CUDA build",
    )


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
    version, keras = (
        versions.get("tensorflow") or versions.get("tensorflow-cpu"),
        versions.get("keras"),
    )
    details = {"version": version, "keras": keras}
    if version is None:
        return Found(
            MISSING,
            "not installed",
            "pip install -c constraints.txt -e '.[tensorflow]'",
            details,
        )
    return Found(OK, f"{version}, Keras {keras or 'missing'}", details=details)


def slurm() -> Found:
    details: dict[str, object] = {
        name: find(name) for name in ("sbatch", "slurmctld", "slurmd", "munged")
    }
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
        return Found(
            OK,
            said + "sbatch, for a cluster elsewhere; no classroom cluster here",
            details=details,
        )
    return Found(
        WARN,
        f"{', '.join(there)}, but no {', '.join(lacking)}",
        "multigpu slurm install",
        details,
    )


def _slurm_version(program: object) -> str | None:
    """The daemon says it at once; Debian's sbatch first wants a slurm.conf."""
    found = re.search(r"\d+\.\d+[\w.]*", ask(str(program), "-V")[1])
    return found and found.group()


def mpi() -> Found:
    path = shutil.which("mpirun")
    if path is None:
        return Found(
            MISSING, "no mpirun", "sudo apt-get install openmpi-bin", {"mpirun": None}
        )
    code, out, err = ask(path, "--version")
    known = {
        "open mpi": "openmpi",
        "openrte": "openmpi",
        "intel": "intel",
        "hydra": "mpich",
        "mpich": "mpich",
    }
    flavour = next((name for mark, name in known.items() if mark in out.lower()), None)
    number = re.search(r"\d+\.\d+[\w.]*", out)
    details = {"flavour": flavour, "version": number and number.group(), "mpirun": path}
    if code != 0:
        problem = first_line(err) or first_line(out) or f"exit code {code}"
        return Found(
            WARN, f"mpirun fails: {problem}", "sudo apt-get install openmpi-bin", details
        )
    return Found(
        OK, f"{flavour or 'unknown kind'} {details['version'] or ''}".strip(), details=details
    )


def sandbox() -> Found:
    path = shutil.which("bwrap")
    if path is None:
        return Found(
            MISSING,
            "no bubblewrap",
            "sudo apt-get install bubblewrap",
            {"bwrap": None, "works": False},
        )
    walls = "--unshare-all --die-with-parent --new-session --cap-drop ALL --ro-bind / / --dev /dev --proc /proc"
    code, _, err = ask(path, *walls.split(), "--tmpfs", "/tmp", "true")
    if code == 0:
        return Found(OK, "bubblewrap works", details={"bwrap": path, "works": True})
    fix = "allow user namespaces: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0; in docker: --privileged"
    return Found(
        WARN, f"bubblewrap fails: {first_line(err)}", fix, {"bwrap": path, "works": False}
    )


def netns() -> Found:
    space = (
        ["unshare", "--net"]
        if os.geteuid() == 0
        else ["unshare", "--user", "--map-root-user", "--net"]
    )
    code, _, err = ask(*space, "true")
    if code != 0:
        details = {"works": False, "slow_link": False}
        return Found(
            MISSING,
            first_line(err) or f"exit code {code}",
            "needs root, or user namespaces",
            details,
        )
    tc = find("tc")
    if tc is None:
        return Found(
            WARN,
            "they work, but no tc",
            "sudo apt-get install iproute2",
            {"works": True, "slow_link": False},
        )
    slow = ("tbf", "rate", "100mbit", "burst", "32kbit", "latency", "400ms")
    code, _, err = ask(*space, tc, "qdisc", "add", "dev", "lo", "root", *slow)
    if code != 0:
        fix = "load the kernel's module: sudo modprobe sch_tbf"
        return Found(
            WARN,
            f"they work, but no slow link: {first_line(err)}",
            fix,
            {"works": True, "slow_link": False},
        )
    return Found(
        OK,
        "they work, and so do slow links (tc tbf)",
        details={"works": True, "slow_link": True},
    )
