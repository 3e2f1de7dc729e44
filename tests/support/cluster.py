"""Submit a job to the classroom cluster, wait for its end, read its log."""

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from commands import clean_environment

from multigpu.classroom import conf

UNFINISHED = ("PENDING", "RUNNING", "SIGNALING", "COMPLETING", "CONFIGURING")


@dataclass
class Job:
    """A job that has ended: its state, its exit code, its log."""

    number: int
    state: str
    exit_code: int
    log: str


class Cluster:
    """Slurm's commands, with the cluster's slurm.conf and without a launcher's variables."""

    def __init__(self) -> None:
        self.conf = conf.conf_path()

    def run(
        self,
        *command: object,
        timeout: float = 60,
        cwd: Path | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        environment = clean_environment(**variables) | {"SLURM_CONF": str(self.conf)}
        # The job file has to set it.
        environment.pop("OMP_NUM_THREADS", None)
        return subprocess.run(
            [str(part) for part in command],
            env=environment,
            text=True,
            timeout=timeout,
            capture_output=True,
            cwd=cwd,
        )

    def submit(self, *arguments: object, cwd: Path, **variables: str) -> int:
        done = self.run("sbatch", "--parsable", *arguments, cwd=cwd, **variables)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def wait(self, number: int, timeout: float = 240) -> Job:
        """Wait for a job's end. `sbatch --wait` would notice it up to 32 s late."""
        deadline = time.monotonic() + timeout
        while True:
            text = self.run("scontrol", "--oneliner", "show", "job", number).stdout
            field = dict(re.findall(r"(\w+)=(\S*)", text))
            if field.get("JobState") not in UNFINISHED:
                break
            if time.monotonic() > deadline:
                self.run("scancel", number)
                log = Path(field["StdOut"])
                raise AssertionError(
                    f"{text}\n{log.read_text() if log.exists() else 'no log'}"
                )
            time.sleep(0.1)
        log = Path(field["StdOut"])
        text = log.read_text() if log.exists() else ""
        return Job(number, field["JobState"], int(field["ExitCode"].split(":")[0]), text)

    def wait_for_tasks(self, number: int, timeout: float = 60) -> None:
        """Wait until a job, with all tasks of its array, has left Slurm's queue."""
        squeue = ("squeue", "--noheader", f"--jobs={number}")
        wait_until(lambda: not self.run(*squeue).stdout.strip(), timeout)

    def job(self, *arguments: object, cwd: Path, timeout: float = 240) -> Job:
        return self.wait(self.submit(*arguments, cwd=cwd), timeout)

    def script(self, folder: Path, text: str, name: str = "job.sh") -> Path:
        """Write a batch script whose log goes to the folder."""
        path = folder / name
        path.write_text(f"#!/bin/bash\n#SBATCH --output={folder}/%A-%a-%j.out\n{text}\n")
        return path


def wait_until(done, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
