"""Runs a command with the recorder in its processes, and ends all of them with it."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from multigpu.errors import UserError
from multigpu.prove import record, settings, workspace
from multigpu.prove.record import ASK_WHERE, DONE_PREFIX, SUFFIX, WHERE_SUFFIX, RankRecord
from multigpu.prove.settings import Settings
from multigpu.virtual import options as virtual_options
from multigpu.virtual.command import SITE
from multigpu.virtual.options import Options

POLL = 0.05  # seconds
MOST_PATIENCE = 5
# Seconds of processor time in `patience` seconds, above which a run computes.
BUSY = 1.0
# Seconds in which processes say where they wait, and in which they end after SIGTERM.
ANSWER = 3.0
GRACE = 2.0
# What a program, or torchrun itself, says if another one listens on its port.
IN_USE = "ddress already in use"
# A process's variables that would make it a rank of another run.
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
OF_A_LAUNCHER += ("SLURM_PROCID", "SLURM_NTASKS")

# Sets of texts are iterated in an order that Python otherwise draws at its start.
SAME_IN_EACH_RUN = {"PYTHONHASHSEED": "0"}


@dataclass
class Run:
    """A run of a command, and what it left.

    name     "the reference", "2 ranks": for messages
    place    its working folder
    code     its exit code; None if it was ended because it hung
    waits    of a run that hung: where each process waits
    """

    name: str
    command: list[str]
    folder: Path
    place: Path
    process: subprocess.Popen | None = None
    code: int | None = None
    seconds: float = 0.0
    waits: list[dict] = field(default_factory=list)

    @property
    def output(self) -> str:
        """What the program printed, without what torchrun adds when a rank fails."""
        return self.with_own_paths(
            re.split(r"\n.*torch[./]distributed[./]elastic", self._whole_output)[0]
        )

    @property
    def port_in_use(self) -> bool:
        """Whether the program or its launcher failed because another one has its port."""
        return IN_USE in self._whole_output

    @property
    def _whole_output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    @property
    def completed(self) -> bool:
        """Whether all its ranks made the last step that was wanted.

        What follows then is not the program's own end, and its exit code says nothing.
        """
        done = {path.name for path in self.folder.glob(f"{DONE_PREFIX}*")}
        ranks = {f"{DONE_PREFIX}{record.rank}" for record in self.records()}
        return self.code == 0 or bool(ranks and ranks <= done)

    def with_own_paths(self, text: str) -> str:
        """A text with the paths that the user knows."""
        return text.replace(str(self.place), str(Path.cwd()))

    def notes(self, prefix: str) -> list[dict]:
        """What its processes noted at their end, in the order of time: see record.py."""
        texts = [path.read_text() for path in self.folder.glob(f"{prefix}*")]
        return sorted(map(json.loads, texts), key=lambda note: note["time"])

    def records(self) -> list[RankRecord]:
        """What its processes have recorded."""
        return record.read(self.folder)


def start(
    name: str,
    command: list[str],
    wishes: Settings,
    gpus: int | None,
    alias: bool = False,
    one_real: bool = False,
) -> Run:
    """Start a run; its output goes to a file. Raises UserError if there is no such command.

    It sees `gpus` virtual GPUs, by alias under further names, or with `one_real` the first of
    this machine's own.
    """
    folder = Path(wishes.folder)
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    path = os.environ.get("PYTHONPATH")
    environment = {
        key: value for key, value in os.environ.items() if key not in OF_A_LAUNCHER
    } | {
        settings.VARIABLE: wishes.to_json(),
        # torchrun leaves folders there.
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join([str(SITE), path] if path else [str(SITE)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        **SAME_IN_EACH_RUN,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if gpus is not None:
        # A GPU with bfloat16 and much memory: neither is what a proof is about.
        options = Options(gpus=gpus, gpu="A100-80GB", link="NVLink3", alias=alias)
        environment[virtual_options.VARIABLE] = options.to_json()
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    place = workspace.make(Path.cwd(), folder / "files")
    if one_real:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    run = Run(name, command, folder, place)
    with open(folder / "output.txt", "wb") as output:
        try:
            run.process = subprocess.Popen(
                command,
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                f"{command[0]} cannot be started ({error.strerror}): give a script, "
                f"`python script.py`, `-m module` or `torchrun script.py`."
            ) from None
    return run


def wait(runs: list[Run], patience: float) -> None:
    """Wait until all runs have ended, and end what is left of them.

    A run that makes no step for `patience` seconds hangs: its processes say where they wait,
    and are ended. So they are if this is interrupted. Before the first step a run that
    computes does not hang, for MOST_PATIENCE times as long.
    """
    began = time.monotonic()
    progress = {run.name: (-1, began) for run in runs}
    computed = {run.name: 0.0 for run in runs}
    latest = began + MOST_PATIENCE * patience
    try:
        waiting = list(runs)
        while waiting:
            time.sleep(POLL)
            for run in list(waiting):
                run.code = run.process.poll()
                now = time.monotonic()
                if run.code is not None:
                    waiting.remove(run)
                    run.seconds = now - began
                    end_all(run)
                    continue
                size = _size(run.folder)
                if size != progress[run.name][0]:
                    progress[run.name] = (size, now)
                elif now - progress[run.name][1] > patience:
                    spent = _cpu_seconds(run.folder)
                    if not size and spent > computed[run.name] + BUSY and now < latest:
                        # It has made no step yet, and computes: imports, data, a slow machine.
                        computed[run.name] = spent
                        progress[run.name] = (size, now)
                        continue
                    run.waits = _ask(run)
                    run.process.kill()
                    run.process.wait()
                    waiting.remove(run)
                    end_all(run)
    except BaseException:
        for run in runs:
            end_all(run)
        raise


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))


def _ask(run: Run) -> list[dict]:
    """Where the ranks of a run wait, in the order of their ranks."""
    (run.folder / ASK_WHERE).touch()
    time.sleep(ANSWER)
    answers = []
    for path in run.folder.glob(f"*{WHERE_SUFFIX}"):
        with suppress(ValueError, OSError):
            answers.append(json.loads(path.read_text()))
    answers = [answer for answer in answers if answer["file"]]
    ranks = [answer for answer in answers if answer["trains"]]
    return sorted(ranks or answers, key=lambda answer: answer["rank"])


def end_all(run: Run) -> None:
    """End each process that the run has started and that still lives.

    A launcher's workers have sessions of their own. What they share is the environment
    variable with the run's folder.
    """
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        until = time.monotonic() + seconds
        processes = _processes(run.folder)
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)
        while processes and time.monotonic() < until:
            with suppress(ChildProcessError):
                run.process.poll()
            time.sleep(POLL / 2)
            processes = _processes(run.folder)
        if not processes:
            return


def _processes(folder: Path) -> list[psutil.Process]:
    mark = json.dumps({"folder": str(folder)})[1:-1]
    ours = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = any(mark in value for value in process.environ().values())
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                ours.append(process)
    return ours


def _cpu_seconds(folder: Path) -> float:
    """The processor time of a run's living processes."""
    seconds = 0.0
    for process in _processes(folder):
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def shown(command: list[str]) -> str:
    """A command as one would type it."""
    return shlex.join(command)


def quoted(command: Sequence[str]) -> str:
    """A command as the value of an option."""
    return f'"{shown(list(command))}"'
