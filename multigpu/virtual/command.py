"""Run a command on virtual GPUs: its processes, its signals, its exit code."""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise, takewhile
from pathlib import Path
from types import FrameType
from typing import NoReturn

from multigpu.errors import UserError, did_you_mean
from multigpu.virtual import options as _options
from multigpu.virtual import record
from multigpu.virtual.options import JOINING, Options
from multigpu.virtual.visible import VARIABLE as CUDA_VISIBLE_DEVICES

SITE = Path(__file__).parents[1] / "site"
# What this process passes on to the program.
PASSED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# torchrun, and the modules that do the same.
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
# Seconds between two looks at several processes.
POLL_SECONDS = 0.05
# Seconds in which the other ranks can write their records after one has failed.
SECONDS_TO_END = 5.0
# What a terminal sends to the program, too: Ctrl-C and Ctrl-\.
FROM_TERMINAL = ("SIGINT", "SIGQUIT")


def run(words: Sequence[str], options: Options, records: Path, quiet: bool = False) -> int:
    """Run the command to its end; return its exit code, -n if signal n has ended it.

    Its processes leave their records in the folder `records`. Standard input and output are
    the program's own; with `quiet` it has none. Ctrl-C reaches the program alone, and SIGTERM
    is passed on to it. In a world each of `options.ranks` is a run of the command; if one
    fails, the others are ended. Raises UserError if there is no such command.
    """
    command = command_line(words)
    if options.world is not None and _starts_ranks(command):
        raise UserError(
            "with --world the command is one rank, but torchrun starts several: leave torchrun"
            " and its flags out, and give the script."
        )
    if options.world is not None and words[0] == "-":
        raise UserError(
            "with --world the program runs several times, but the standard input can be read "
            "once: give the file of a script."
        )
    path = os.environ.get("PYTHONPATH")
    programs = _stand_ins(records)
    environment = os.environ | {
        _options.VARIABLE: options.to_json(),
        record.VARIABLE: str(records),
        "PYTHONPATH": os.pathsep.join([str(SITE), path] if path else [str(SITE)]),
        "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
    }
    environments = [environment]
    if options.world is not None:
        environments = [environment | _rank(options, rank, records) for rank in options.ranks]
    # A signal can arrive before the processes exist.
    processes: list[subprocess.Popen] = []
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if len(processes) < len(environments):
            early.append(number)
        for process in processes:
            process.send_signal(number)

    def leave_to_terminal(number: int, frame: FrameType | None) -> None:
        if not _in_foreground():
            pass_on(number, frame)

    handlers = dict.fromkeys(PASSED_ON, pass_on) | dict.fromkeys(
        FROM_TERMINAL, leave_to_terminal
    )
    with _signal_handlers(handlers):
        for variables in environments:
            # Only one of several processes can read the standard input.
            no_input = quiet or bool(processes)
            try:
                process = subprocess.Popen(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL if no_input else None,
                    stdout=subprocess.DEVNULL if quiet else None,
                    stderr=subprocess.DEVNULL if quiet else None,
                )
            except OSError as error:
                raise UserError(
                    f"{command[0]} cannot be started ({error.strerror}): give a script, "
                    f"`python script.py`, `-m module` or `torchrun script.py`."
                ) from None
            processes.append(process)
        for number in early:
            for process in processes:
                process.send_signal(number)
        return _wait(processes)


def _stand_ins(records: Path) -> Path:
    """Write the program nvidia-smi of virtual GPUs; return its folder."""
    folder = records / "programs"
    folder.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(SITE.parents[1])!r}); "
        f"from multigpu.virtual import nvidia_smi; nvidia_smi.main(sys.argv[1:])"
    )
    words = (sys.executable, "-c", code)
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return folder


def _starts_ranks(command: Sequence[str]) -> bool:
    """Whether the command is torchrun, by any of its names."""
    before_script = takewhile(lambda word: not word.endswith(".py"), command)
    return any(Path(word).name in TORCHRUN for word in before_script)


def ranks_of_torchrun(words: Sequence[str]) -> int:
    """The ranks that the command lets torchrun start on this machine; 0 if it says none."""
    if not _starts_ranks(words):
        return 0
    flags = [*takewhile(lambda word: not word.endswith(".py"), words), ""]
    for word, after in pairwise(flags):
        flag, equals, value = word.partition("=")
        count = value if equals else after
        if flag in ("--nproc-per-node", "--nproc_per_node") and count.isdigit():
            return int(count)
    return 0


def _wait(processes: list[subprocess.Popen]) -> int:
    """Wait for all processes; return the exit code of the first one that fails, else 0.

    If one fails, the others are ended, because they would wait for its messages: by SIGTERM,
    and SECONDS_TO_END later by SIGKILL.
    """
    if len(processes) == 1:
        return processes[0].wait()
    code = 0
    kill_at = math.inf
    waiting = list(processes)
    while waiting:
        for process in [process for process in waiting if process.poll() is not None]:
            waiting.remove(process)
            if process.returncode and not code:
                code = process.returncode
                kill_at = time.monotonic() + SECONDS_TO_END
                for other in waiting:
                    other.terminate()
        if time.monotonic() > kill_at:
            for other in waiting:
                other.kill()
        time.sleep(POLL_SECONDS)
    return code


def _rank(options: Options, rank: int, records: Path) -> dict[str, str]:
    """The environment of a rank of the world, as torchrun sets it."""
    per_node = options.gpus
    variables = {
        "RANK": rank,
        "WORLD_SIZE": options.world,
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": options.world // per_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "multigpu-virtual",
        JOINING: records / "joining",
        # It is about this machine, and the rank is on another one.
        CUDA_VISIBLE_DEVICES: ",".join(map(str, range(per_node))),
    }
    return {name: str(value) for name, value in variables.items()}


def command_line(words: Sequence[str]) -> list[str]:
    """The program and the arguments that `words` mean.

    `script.py …`, `-m module …` and `-`, the standard input, run with this Python, and so do
    `python …` and `torchrun …`. Another word is a program. Raises UserError if there is no
    such file.
    """
    first, *rest = words
    if first in ("-m", "-c", "-"):
        return [sys.executable, *words]
    if re.fullmatch(r"python[\d.]*", first):
        return [sys.executable, *rest]
    if first == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *rest]
    if first.startswith("-"):
        raise UserError(
            f"{first} is no flag of this command: see its --help. The program's own flags "
            f"come after the script."
        )
    path = Path(first)
    is_program = path.is_file() and os.access(path, os.X_OK) and path.suffix != ".py"
    if path.exists() and not is_program:
        return [sys.executable, *words]
    if is_program and os.sep not in first:
        return [os.path.join(os.curdir, first), *rest]
    if not is_program and shutil.which(first) is None:
        near = did_you_mean(first, (str(file) for file in path.parent.glob("*.py")))
        raise UserError(
            f"there is no script {first}"
            + (f": {near}" if near else ": give the path of one, or -m and a module.")
        )
    return list(words)


def real_gpus(root: Path = Path("/")) -> int:
    """The number of NVIDIA's GPUs of this machine; `root` has dev and proc."""
    driver = root / "proc/driver/nvidia/gpus"
    listed = len(list(driver.iterdir())) if driver.is_dir() else 0
    return max(listed, len(list((root / "dev").glob("nvidia[0-9]*"))))


def end_as(code: int) -> NoReturn:
    """End this process as the program ended: with its exit code, or by the same signal."""
    if code < 0:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        _write_no_core()
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise SystemExit(code if code >= 0 else 128 - code)


@contextmanager
def _signal_handlers(handlers: dict) -> Iterator[None]:
    """Install the handlers by the signals' names for a block; what is ignored stays so."""
    numbers = {getattr(signal, name): handler for name, handler in handlers.items()}
    previous = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number in numbers if previous[number] != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, numbers[number])
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, previous[number])


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process, and so to the program."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _write_no_core() -> None:
    """Let a signal end this process without a core file: the program wrote its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
