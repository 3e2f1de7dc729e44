"""Run a job file in a shell, with stand-ins for Slurm's programs and for torchrun.

The stand-in srun runs its command once. So what a job file does by itself is seen in less than
a second, without a cluster.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Prints what it was given, as JSON, and ends with the number after --code.
SCRIPT = """
import json, os, sys
names = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
seen = {name: os.environ.get(name) for name in names}
print(json.dumps({"script": sys.argv[0], "options": sys.argv[1:], **seen}), flush=True)
sys.exit(int(sys.argv[sys.argv.index("--code") + 1]) if "--code" in sys.argv else 0)
"""
# A program that runs what follows its own options.
RUNS_THE_REST = 'while [ "${1#-}" != "$1" ]; do shift; done\n'
PROGRAMS = {
    "srun": RUNS_THE_REST + 'SLURM_NODEID=0 exec "$@"\n',
    "torchrun": RUNS_THE_REST + 'exec python "$@"\n',
    "scontrol": '[ "$2" = hostnames ] && echo n1 || echo "NodeAddr=127.0.0.1 OS=Linux"\n',
    # It "has" every package, and runs a script with a real Python.
    "python": f'[ "$1" = -c ] || exec {sys.executable} -IS "$@"\n',
}
JOB = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NAME": "job",
    "SLURM_JOB_NODELIST": "n1",
    "SLURMD_NODENAME": "n1",
    "SLURM_NNODES": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "3",
}


@dataclass
class Ended:
    """A job file that has ended: its exit code, its output, what SCRIPT has printed."""

    code: int
    text: str

    @property
    def seen(self) -> dict:
        (line,) = [line for line in self.text.splitlines() if line.startswith("{")]
        return json.loads(line)


def programs(folder: Path, **more: str) -> Path:
    """Write the stand-ins, and `more` of them; return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (PROGRAMS | more).items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    return folder


def run_job(folder: Path, job: Path | str, *options: str, **variables: str) -> Ended:
    """Run a job file in `folder`, as Slurm does on a node.

    The stand-ins must be in `folder/bin`. A variable with the value "" is not set.
    """
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder)}
    environment |= JOB | variables
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", str(job), *options],
        env={name: value for name, value in environment.items() if value},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return Ended(done.returncode, done.stdout)
