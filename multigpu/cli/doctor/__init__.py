"""What can this machine run? One line a check: ok, warn or missing, what was found, why it matters, what to do.

`multigpu doctor --json` prints one object. Its keys and the names of the checks change only together with `schema`:

    schema    1
    multigpu  the package's version
    ok        false if something is missing that every lesson needs; the exit code is then 1
    checks    a list in the order of CHECKS below, one object each:
        name     as in CHECKS
        status   "ok", "warn" (works with a limit, or could not be found out) or "missing"
        needed   true if every lesson needs it
        found    what was found, one line of text
        why      why it matters
        fix      what to do, "" if nothing is to be done
        details  numbers and versions, with the keys that CHECKS gives for that name; null where unknown

Each check is bounded in time, and none of them raises: what goes wrong in a check is its result.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from multigpu import __version__
from multigpu.cli.doctor import machine, software
from multigpu.cli.doctor.machine import MISSING, OK, WARN, Found

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1
COLOURS = {OK: "green", WARN: "yellow", MISSING: "red"}


class Spec(NamedTuple):
    """A check: its name, is it needed by every lesson, why it matters, the keys of its details, the probe."""

    name: str
    needed: bool
    why: str
    details: tuple[str, ...]
    probe: Callable[..., Found]
    from_torch: bool = False  # the probe wants to know what torch says


CHECKS = (
    Spec("python", True, "Every script and notebook runs in it.", ("version",), machine.python),
    Spec("cpu", False, "Two ranks on CPUs can only be faster than one if each has a core.", ("cores",), machine.cpu),
    Spec(
        "memory", False, "Each rank loads torch and the data: about half a GiB.", ("total_gib", "available_gib"),
        machine.memory,
    ),
    Spec("gpu", False, "The lessons train on GPUs if there are any.", ("count", "devices"), software.gpu, True),
    Spec("torch", True, "Most lessons train with it.", ("version", "cuda", "hip"), software.torch, True),
    Spec("gloo", True, "Ranks on CPUs talk through it.", ("works",), software.gloo, True),
    Spec("nccl", False, "Ranks on NVIDIA GPUs talk through it.", ("version",), software.nccl, True),
    Spec("torch-mpi", False, "Another way for ranks to talk; no lesson needs it.", ("built_in",), software.torch_mpi, True),
    Spec("tensorflow", False, "Lessons 07 and 08 train with it.", ("version", "keras"), software.tensorflow),
    Spec(
        "slurm", False, "sbatch takes the job files; the daemons are the classroom cluster.",
        ("version", "sbatch", "slurmctld", "slurmd", "munged"), software.slurm,
    ),
    Spec("mpi", False, "mpirun can start the ranks instead of torchrun.", ("flavour", "version", "mpirun"), software.mpi),
    Spec("sandbox", False, "Students' code is graded in it.", ("bwrap", "works"), software.sandbox),
    Spec("netns", False, "Network namespaces emulate slow links between nodes.", ("works", "slow_link"), software.netns),
    Spec("port", True, "Ranks meet at a port of rank 0's machine.", ("loopback", "port_29500_free"), machine.port),
    Spec("shm", False, "NCCL and DataLoader workers pass data through it.", ("total_gib", "free_gib"), machine.shm),
    Spec("files", False, "Connections and workers' tensors are open files.", ("soft", "hard"), machine.files),
)  # fmt: skip


@dataclass
class Check:
    """The result of one check; its fields are the JSON's, in that order."""

    name: str
    status: str
    needed: bool
    found: str
    why: str
    fix: str
    details: dict[str, object]


def examine() -> list[Check]:
    """Make all checks side by side and give them in the order of CHECKS. Takes a few seconds; never raises."""
    with ThreadPoolExecutor(max_workers=len(CHECKS) + 1) as pool:
        facts = pool.submit(software.torch_facts)
        results = [pool.submit(_check, spec, facts.result) for spec in CHECKS]
        return [result.result() for result in results]


def _check(spec: Spec, facts: Callable[[], dict]) -> Check:
    try:
        found = spec.probe(facts()) if spec.from_torch else spec.probe()
    except (
        Exception
    ) as error:  # an odd machine must not stop the doctor: what happened is the result
        status = MISSING if spec.needed else WARN
        text = " ".join(f"the check failed: {type(error).__name__}: {error}".split())
        found = Found(status, text, "report this line, if a lesson does not run")
    details = {key: found.details.get(key) for key in spec.details}
    return Check(
        spec.name, found.status, spec.needed, found.text, spec.why, found.fix, details
    )


def works(checks: list[Check]) -> bool:
    """Is everything here that every lesson needs?"""
    return not any(check.needed and check.status == MISSING for check in checks)


def as_dict(checks: list[Check]) -> dict[str, object]:
    """Give what --json prints; the module's docstring describes it."""
    rows = [vars(check) for check in checks]
    return {"schema": SCHEMA, "multigpu": __version__, "ok": works(checks), "checks": rows}


def as_table(checks: list[Check]) -> "RenderableType":
    """Give what a person reads, 80 columns wide or more, and a verdict as the last line."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), expand=False)
    for check in checks:
        text = Text(check.found)
        text.append(f"\n{check.why}", "dim")
        if check.status != OK and check.fix:
            text.append("\nto do: ", "bold")
            text.append(check.fix)
        table.add_row(
            Text(check.status, COLOURS[check.status]), Text(check.name, "bold"), text
        )
    lacking = [check.name for check in checks if check.needed and check.status == MISSING]
    verdict = "Every lesson's needs are met; what is missing above is for single lessons."
    if lacking:
        verdict = f"The lessons cannot run yet: {', '.join(lacking)}. See 'to do' above."
    return Group(table, Text(), Text(verdict))
