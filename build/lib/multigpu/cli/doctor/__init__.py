"""`multigpu doctor`: what this machine can run, and what to do about the rest.

`multigpu doctor --json` prints one object. Its keys and the names of the checks change only
together with `schema`:

    schema    1
    multigpu  the package's version
    ok        false if something is missing that every lesson needs; the exit code is then 1
    checks    a list in the order of CHECKS below, one object each:
        name     as in CHECKS
        status   "ok", "warn" (works with a limit, or the result is unknown) or "missing"
        needed   true if every lesson needs it
        found    what was found, one line of text
        why      why it matters
        fix      what to do, "" if nothing has to be done
        details  numbers and versions, with the keys in CHECKS; null if unknown

Each check has a time limit, and none of them raises: an error in a check is its result.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multigpu import __version__
from multigpu.cli.doctor import machine, pytorch, software
from multigpu.cli.doctor.machine import MISSING, OK, WARN, Finding

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1
COLOURS = {OK: "green", WARN: "yellow", MISSING: "red"}


@dataclass(frozen=True)
class Spec:
    """A check.

    name         its name
    why          why it matters
    details      the keys of its details
    probe        the function that makes the check
    needed       whether every lesson needs what it checks
    from_torch   whether the probe takes what `pytorch.torch_facts` returned
    """

    name: str
    why: str
    details: tuple[str, ...]
    probe: Callable[..., Finding]
    needed: bool = False
    from_torch: bool = False


CHECKS = (
    Spec(
        "python",
        "Every script and notebook runs in it.",
        ("version",),
        machine.python,
        needed=True,
    ),
    Spec(
        "cpu",
        "Two ranks on CPUs can only be faster than one if each has a core.",
        ("cores",),
        machine.cpu,
    ),
    Spec(
        "memory",
        "Each rank loads torch and the data: about half a GiB.",
        ("total_gib", "available_gib"),
        machine.memory,
    ),
    Spec(
        "gpu",
        "The lessons train on GPUs if there are any.",
        ("count", "devices"),
        pytorch.gpu,
        from_torch=True,
    ),
    Spec(
        "torch",
        "Most lessons train with it.",
        ("version", "cuda", "hip"),
        pytorch.torch,
        needed=True,
        from_torch=True,
    ),
    Spec(
        "gloo",
        "Ranks on CPUs communicate through it.",
        ("works",),
        pytorch.gloo,
        needed=True,
        from_torch=True,
    ),
    Spec(
        "nccl",
        "Ranks on NVIDIA GPUs communicate through it.",
        ("version",),
        pytorch.nccl,
        from_torch=True,
    ),
    Spec(
        "torch-mpi",
        "Ranks can communicate through it too; no lesson needs it.",
        ("built_in",),
        pytorch.torch_mpi,
        from_torch=True,
    ),
    Spec(
        "tensorflow",
        "Lessons 07 and 08 train with it.",
        ("version", "keras"),
        software.tensorflow,
    ),
    Spec(
        "slurm",
        "sbatch submits the job files; the daemons are the classroom cluster's.",
        ("version", "sbatch", "slurmctld", "slurmd", "munged"),
        software.slurm,
    ),
    Spec(
        "mpi",
        "mpirun can start the ranks instead of torchrun.",
        ("flavour", "version", "mpirun"),
        software.mpi,
    ),
    Spec(
        "sandbox",
        "Students' code is graded in it.",
        ("bwrap", "works"),
        software.sandbox,
    ),
    Spec(
        "netns",
        "Network namespaces emulate slow links between nodes.",
        ("works", "slow_link"),
        software.netns,
    ),
    Spec(
        "port",
        "Ranks connect to a port of rank 0's machine.",
        ("loopback", "port_29500_free"),
        machine.port,
        needed=True,
    ),
    Spec(
        "shm",
        "NCCL and DataLoader workers pass data through it.",
        ("total_gib", "free_gib"),
        machine.shm,
    ),
    Spec(
        "files",
        "Connections and workers' tensors are open files.",
        ("soft", "hard"),
        machine.files,
    ),
)


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
    """Make all checks in parallel; return them in the order of CHECKS. It never raises."""
    with ThreadPoolExecutor(max_workers=len(CHECKS) + 1) as pool:
        facts = pool.submit(pytorch.torch_facts)
        results = [pool.submit(_check, spec, facts.result) for spec in CHECKS]
        return [result.result() for result in results]


def _check(spec: Spec, facts: Callable[[], dict]) -> Check:
    try:
        finding = spec.probe(facts()) if spec.from_torch else spec.probe()
    except Exception as error:
        # An unusual machine must not stop the doctor: the exception is the result.
        status = MISSING if spec.needed else WARN
        text = " ".join(f"the check failed: {type(error).__name__}: {error}".split())
        finding = Finding(status, text, "report this line, if a lesson does not run")
    return Check(
        name=spec.name,
        status=finding.status,
        needed=spec.needed,
        found=finding.text,
        why=spec.why,
        fix=finding.fix,
        details={key: finding.details.get(key) for key in spec.details},
    )


def works(checks: list[Check]) -> bool:
    """Whether this machine has everything that every lesson needs."""
    return not any(check.needed and check.status == MISSING for check in checks)


def as_dict(checks: list[Check]) -> dict[str, object]:
    """What --json prints; the module's docstring describes it."""
    rows = [vars(check) for check in checks]
    return {"schema": SCHEMA, "multigpu": __version__, "ok": works(checks), "checks": rows}


def as_table(checks: list[Check]) -> "RenderableType":
    """The table for a terminal of at least 80 columns; its last line is the verdict."""
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
        status = Text(check.status, COLOURS[check.status])
        table.add_row(status, Text(check.name, "bold"), text)
    missing = [check.name for check in checks if check.needed and check.status == MISSING]
    verdict = "The lessons can run; only some of them need what is missing above."
    if missing:
        verdict = f"The lessons cannot run yet: {', '.join(missing)}. See 'to do' above."
    return Group(table, Text(), Text(verdict))
