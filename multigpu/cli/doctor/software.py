"""Probes of installed programs: one function each; see machine.py for what a probe is."""

import importlib.metadata
import os
import re
import shutil

from multigpu.cli.doctor.machine import MISSING, OK, WARN, Finding
from multigpu.launch import sandbox as bubblewrap
from multigpu.launch.commands import find_program, first_line, run_bounded

# What `mpirun --version` contains → the implementation
MPI_FLAVOURS = {
    "open mpi": "openmpi",
    "openrte": "openmpi",
    "intel": "intel",
    "hydra": "mpich",
    "mpich": "mpich",
}
VERSION = re.compile(r"\d+\.\d+[\w.]*")


def tensorflow() -> Finding:
    version = _package_version("tensorflow") or _package_version("tensorflow-cpu")
    keras = _package_version("keras")
    details = {"version": version, "keras": keras}
    if version is None:
        fix = "pip install -c constraints.txt -e '.[tensorflow]'"
        return Finding(MISSING, "not installed", fix, details)
    return Finding(OK, f"{version}, Keras {keras or 'missing'}", details=details)


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def slurm() -> Finding:
    details: dict[str, object] = {
        name: find_program(name) for name in ("sbatch", "slurmctld", "slurmd", "munged")
    }
    installed = [name for name, path in details.items() if path]
    missing = [name for name, path in details.items() if not path]
    if not installed:
        return Finding(MISSING, "not installed", "multigpu slurm install", details)
    version = _slurm_version(details["slurmctld"] or details["sbatch"])
    details["version"] = version
    label = version or "unknown version"
    if not missing:
        return Finding(OK, f"{label}: {', '.join(installed)}", details=details)
    if installed in (["sbatch"], ["sbatch", "munged"]):
        text = f"{label}: sbatch, for a cluster elsewhere; no classroom cluster here"
        return Finding(OK, text, details=details)
    text = f"{', '.join(installed)}, but no {', '.join(missing)}"
    return Finding(WARN, text, "multigpu slurm install", details)


def _slurm_version(program: object) -> str | None:
    """The version that a program prints with -V; Debian's sbatch needs a slurm.conf for -V."""
    match = VERSION.search(run_bounded(str(program), "-V")[1])
    return match and match.group()


def mpi() -> Finding:
    path = shutil.which("mpirun")
    if path is None:
        fix = "sudo apt-get install openmpi-bin"
        return Finding(MISSING, "no mpirun", fix, {"mpirun": None})
    code, out, err = run_bounded(path, "--version")
    marks = (mark for mark in MPI_FLAVOURS if mark in out.lower())
    flavour = MPI_FLAVOURS.get(next(marks, ""))
    version = VERSION.search(out)
    details = {"flavour": flavour, "version": version and version.group(), "mpirun": path}
    if code != 0:
        problem = first_line(err) or first_line(out) or f"exit code {code}"
        fix = "sudo apt-get install openmpi-bin"
        return Finding(WARN, f"mpirun fails: {problem}", fix, details)
    text = f"{flavour or 'unknown implementation'} {details['version'] or ''}".strip()
    return Finding(OK, text, details=details)


def sandbox() -> Finding:
    bwrap = bubblewrap.probe()
    details: dict[str, object] = {"bwrap": bwrap.program, "works": bwrap.works}
    if bwrap.works:
        return Finding(OK, "bubblewrap works", details=details)
    if bwrap.program is None:
        fix = "sudo apt-get install bubblewrap"
        return Finding(MISSING, "no bubblewrap", fix, details)
    fix = (
        "allow user namespaces: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0; "
        "in docker: --privileged"
    )
    return Finding(WARN, f"bubblewrap fails: {bwrap.problem}", fix, details)


def netns() -> Finding:
    namespace = ["unshare", "--net"]
    if os.geteuid() != 0:
        namespace = ["unshare", "--user", "--map-root-user", "--net"]
    code, _, err = run_bounded(*namespace, "true")
    if code != 0:
        problem = first_line(err) or f"exit code {code}"
        details = {"works": False, "slow_link": False}
        return Finding(MISSING, problem, "needs root, or user namespaces", details)
    no_slow_link: dict[str, object] = {"works": True, "slow_link": False}
    tc = find_program("tc")
    if tc is None:
        fix = "sudo apt-get install iproute2"
        return Finding(WARN, "they work, but there is no tc", fix, no_slow_link)
    slow = ("tbf", "rate", "100mbit", "burst", "32kbit", "latency", "400ms")
    code, _, err = run_bounded(*namespace, tc, "qdisc", "add", "dev", "lo", "root", *slow)
    if code != 0:
        text = f"they work, but slow links do not: {first_line(err)}"
        fix = "load the kernel's module: sudo modprobe sch_tbf"
        return Finding(WARN, text, fix, no_slow_link)
    text = "they work, and slow links too (tc tbf)"
    return Finding(OK, text, details={"works": True, "slow_link": True})
