"""Probes of torch and its parts: one function each; see machine.py for what a probe is.

torch is imported in another process, because a broken or slow installation can abort or hang.
"""

import json
import re
import sys

from multigpu.cli.doctor.machine import MISSING, OK, WARN, Finding
from multigpu.launch.commands import first_line, last_line, run_bounded

TORCH_FROM, TORCH_BELOW = (2, 11), (2, 14)  # as in pyproject.toml
TORCH_SECONDS = 20  # a first import from a network file system is slow
INSTALL_TORCH = f"{sys.executable} -m pip install 'torch>=2.11,<2.14'"

# It prints the facts twice. gloo resolves the host's name; if that hangs, the first line is
# already printed and has all other facts.
TORCH_PROBE = """
import json, torch
import torch.distributed as dist
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
facts["gpus"] = []
for i in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(i)
    facts["gpus"].append({"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)})
facts |= {"nccl": None, "mpi": False, "gloo": "this torch was built without it"}
if dist.is_available():
    facts["mpi"] = dist.is_mpi_available()
    if dist.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if dist.is_gloo_available():
        facts["gloo"] = None
print(json.dumps(facts | {"gloo": facts["gloo"] or "no answer"}), flush=True)
if facts["gloo"] is None:
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        facts["gloo"] = str(error) or type(error).__name__
print(json.dumps(facts), flush=True)
"""


def torch_facts() -> dict[str, object]:
    """What TORCH_PROBE prints; {"error": …} if importing torch fails or takes too long."""
    command = (sys.executable, "-P", "-W", "ignore", "-c", TORCH_PROBE)
    code, out, err = run_bounded(*command, seconds=TORCH_SECONDS)
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {"error": last_line(err) or f"exit code {code}"}


def torch(facts: dict) -> Finding:
    if "error" in facts:
        return Finding(MISSING, facts["error"], INSTALL_TORCH)
    version = facts["version"]
    details = {key: facts[key] for key in ("version", "cuda", "hip")}
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if TORCH_FROM <= numbers < TORCH_BELOW:
        return Finding(OK, version, details=details)
    # A newer version is not tested; an older one lacks functions that the course uses.
    status = MISSING if numbers < TORCH_FROM else WARN
    tested = "{}.{} to below {}.{}".format(*TORCH_FROM, *TORCH_BELOW)
    text = f"{version}; the course is tested with {tested}"
    return Finding(status, text, INSTALL_TORCH, details)


def gpu(facts: dict) -> Finding:
    gpus = facts.get("gpus", [])
    if gpus:
        names = ", ".join(f"{gpu['name']} ({gpu['memory_gib']:g} GiB)" for gpu in gpus)
        details = {"count": len(gpus), "devices": gpus}
        return Finding(OK, f"{len(gpus)}: {names}", details=details)
    details = {"count": 0, "devices": []}
    code, out, _ = run_bounded("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    names = [line for line in out.splitlines() if line.strip()]
    if code != 0 or not names:
        fix = "nothing; to use GPUs on a cluster, ask Slurm with --gpus-per-node=2"
        return Finding(MISSING, "none: the lessons run on CPU processes", fix, details)
    text = f"nvidia-smi sees {len(names)} ({names[0]}), torch sees none"
    fix = (
        "check that CUDA_VISIBLE_DEVICES does not hide them, and that the driver is new "
        "enough for torch's CUDA"
    )
    if facts.get("cuda") is None:
        fix = "install torch's CUDA build: this one is for CPUs"
    return Finding(WARN, text, fix, details)


def gloo(facts: dict) -> Finding:
    problem = facts.get("error") or facts.get("gloo")
    if problem is None:
        return Finding(OK, "an all-reduce succeeded", details={"works": True})
    fix = "if the host's name does not resolve, add it to /etc/hosts; else reinstall torch"
    return Finding(MISSING, first_line(problem), fix, {"works": False})


def nccl(facts: dict) -> Finding:
    version = facts.get("nccl")
    if version:
        return Finding(OK, version, details={"version": version})
    text = "not in this torch; only GPUs need it"
    return Finding(MISSING, text, "with GPUs: install torch's CUDA build")


def torch_mpi(facts: dict) -> Finding:
    if facts.get("mpi"):
        return Finding(OK, "built in", details={"built_in": True})
    return Finding(MISSING, "not in this torch: use gloo or NCCL", details={"built_in": False})
