"""Processes that start in milliseconds: forks of a process that has imported torch.

`python()` is the path of a command that takes Python's arguments: a script, `-m module` or `-c
code`; `torchrun` and `multigpu` stand beside it. The command sends its arguments, its
environment and its open files to the warm process (a server), which forks; the fork runs the
program. In the fork `sys.executable` is that command, so that the ranks of mp.spawn, of
torchrun and of the Trainer, and the programs of `multigpu`, start in the same way. Programs
that import TensorFlow are forks of a second process, which has imported that.

A test of a real start (a launcher, an import, Python's end) uses `sys.executable`. With
REAL_START=1 the command is Python itself, for all tests: `make test-real`.
"""

import atexit
import faulthandler
import fcntl
import gc
import importlib.machinery
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

from warm_client import HASH_SEED, PROGRAMS

TORCH = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.multiprocessing",
    "torch.nn.parallel",
    "cloudpickle",
    "scipy.stats",  # most of sklearn, which itself sets variables that a fork must set
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "tqdm.auto",
    "multigpu.trainer",
    "multigpu.virtual.control",
    "multigpu.proof",
    "multigpu.elastic.checkpoint_file",
)
# In a program's environment: the seconds after which it prints the stacks of its threads.
WHERE_AFTER = "WARM_WHERE_AFTER"
# The folder of a server that runs already.
SHARED = "WARM_FOLDER"
INTERRUPTED = object()  # the end of a program by Ctrl-C, beside exit codes
TENSORFLOW = ("multigpu.tf_common", "keras")
SUPPORT = Path(__file__).parent


# ---- in the process that runs the tests ----------------------------------------------------


@cache
def python() -> Path:
    """The command that starts a program in a fork. The first call starts the server.

    The processes that this one starts later use the same server: pytest's workers, say.
    """
    if SHARED in os.environ:
        return Path(os.environ[SHARED], "python")
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    os.environ[SHARED] = str(folder)
    real = "REAL_START" in os.environ
    for name in ("python", "python3", *PROGRAMS):
        words = [sys.executable, "-IS", str(SUPPORT / "warm_client.py"), str(folder), name]
        if real:
            words = [sys.executable, *PROGRAMS.get(name, [])]
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        command.chmod(0o755)
    write_kernel(folder)
    if real:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder / "python"
    (folder / "network").write_text(os.readlink("/proc/self/ns/net"))
    listeners = []
    for name in ("torch", "tensorflow"):
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(str(folder / f"{name}.socket"))
        listeners[-1].listen(64)
    server = subprocess.Popen(
        [sys.executable, __file__, folder, *(str(one.fileno()) for one in listeners)],
        pass_fds=[one.fileno() for one in listeners],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the tests, which then end the server
        # Read when torch is imported, and when Python starts.
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": HASH_SEED},
    )
    for listener in listeners:
        listener.close()
    atexit.register(stop, server)
    return folder / "python"


def torchrun() -> Path:
    """torchrun, itself and its ranks in forks. The first call starts the server."""
    return python().with_name("torchrun")


def write_kernel(folder: Path) -> None:
    """The Jupyter kernel `warm`: found if JUPYTER_PATH is the folder."""
    kernel = folder / "kernels" / "warm"
    kernel.mkdir(parents=True)
    command = [str(folder / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "warm", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))


def stop(server: subprocess.Popen) -> None:
    """End the server, which ends when its standard input does."""
    server.stdin.close()
    server.wait()


# ---- the server ----------------------------------------------------------------------------


class Server:
    """Fork for each connection, and send the fork's process id and, at its end, exit code.

    The first connection to `tensorflow` forks a second server, which imports TensorFlow.
    """

    def __init__(self, folder: str, torch: socket.socket, tensorflow: socket.socket) -> None:
        self.folder = folder
        self.selector = selectors.DefaultSelector()
        self.selector.register(sys.stdin, selectors.EVENT_READ, self.stop)
        self.selector.register(torch, selectors.EVENT_READ, self.accept)
        self.selector.register(tensorflow, selectors.EVENT_READ, self.fork_second)
        self.running = True

    def serve(self, modules: tuple[str, ...]) -> None:
        """Import the modules and serve until the tests' process closes standard input."""
        for name in modules:
            __import__(name)
        # A garbage collection in a fork would write to all objects, and so copy their memory.
        gc.collect()
        gc.freeze()
        while self.running:
            for key, _ in self.selector.select():
                key.data(key.fileobj)
        # The tests' process does not do it, because a process that is killed runs no atexit.
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self, stdin: object) -> None:
        self.running = False

    def fork_second(self, listener: socket.socket) -> None:
        self.selector.unregister(listener)
        if os.fork():
            listener.close()
            return
        self.selector = selectors.DefaultSelector()
        self.selector.register(sys.stdin, selectors.EVENT_READ, self.stop)
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.serve(TENSORFLOW)
        os._exit(0)

    def accept(self, listener: socket.socket) -> None:
        """Read a request, and fork: the fork becomes the program."""
        connection, _ = listener.accept()
        head, files, _, _ = socket.recv_fds(connection, 8, 250)
        if not head:
            connection.close()
            return
        size = int.from_bytes(head, "little")
        text = b""
        while len(text) < size:
            part = connection.recv(size - len(text))
            if not part:  # the client has ended
                connection.close()
                return
            text += part
        request = json.loads(text)
        child = os.fork()
        if child == 0:
            os.setsid()
            self.selector.close()
            become(self.folder, request, files)
        for file in files:
            os.close(file)
        with suppress(OSError):
            connection.sendall(child.to_bytes(8, "little", signed=True))
        program = Program(child, os.pidfd_open(child), connection)
        read = selectors.EVENT_READ
        self.selector.register(program.pidfd, read, lambda _: self.end(program))
        self.selector.register(connection, read, lambda _: self.kill_group(program))

    def end(self, program: "Program") -> None:
        """The program has ended: send its exit code."""
        _, status = os.waitpid(program.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError):
            program.connection.sendall(code.to_bytes(8, "little", signed=True))
        self.selector.unregister(program.pidfd)
        os.close(program.pidfd)
        if program.connection.fileno() in self.selector.get_map():
            self.selector.unregister(program.connection)
        program.connection.close()

    def kill_group(self, program: "Program") -> None:
        """The client has ended before its program: end the program and its process group."""
        self.selector.unregister(program.connection)
        os.kill(program.pid, signal.SIGKILL)  # it may not lead its group yet
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Program:
    """A running program: a fork, and the connection to its client."""

    pid: int
    pidfd: int
    connection: socket.socket


def become(folder: str, request: dict, files: list[int]) -> NoReturn:
    """Become the program: its open files, environment, working directory and arguments."""
    import multiprocessing.process
    import multiprocessing.spawn

    # First to high numbers: a wanted number may be that of another received file.
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=request["unbuffered"])
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(request["environment"])
    if WHERE_AFTER in os.environ:
        faulthandler.dump_traceback_later(float(os.environ[WHERE_AFTER]), file=sys.stderr)
    if torch := sys.modules.get("torch"):
        torch.distributed.set_debug_level_from_env()  # torch reads it when it is imported
    os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
    if "keras" in sys.modules:
        os.environ["WARM_IMPORTED"] = "tensorflow"
    os.getppid = lambda: parent_of(request["pid"])
    sys.executable = os.path.join(folder, "python")
    multiprocessing.spawn.set_executable(sys.executable)
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # where __main__'s path starts
    for entry in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if entry:
            sys.path.insert(0, entry)
    if {"MULTIGPU_VIRTUAL", "MULTIGPU_PROVE"} & os.environ.keys():
        # Python's start imports it.
        sys.modules.pop("sitecustomize", None)
        import sitecustomize  # noqa: F401
    try:
        run_program(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = report(error)
    finish(code)


def report(error: BaseException) -> object:
    """Print an exception that the program did not catch, without this file's frames.

    Returns the exit code, or INTERRUPTED.
    """
    place = error.__traceback__
    while place and place.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        place = place.tb_next
    sys.excepthook(type(error), error.with_traceback(place), place)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def finish(code: object) -> NoReturn:
    """End as Python does, but leave all objects as they are.

    Python frees them while it holds the GIL, and a thread of gloo that needs the GIL can then
    stop the process, or abort it (pytorch/pytorch#190489). The tests of real starts find that.
    """
    if code is not INTERRUPTED and not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code is INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def parent_of(pid: int) -> int:
    """The parent's process id; the parent of a client is the program's, too."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def run_program(arguments: list[str]) -> None:
    """What `python arguments…` does."""
    first, *rest = arguments
    if first == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__loader__ = importlib.machinery.BuiltinImporter
        exec(compile(code, "<string>", "exec"), vars(main))
    elif first == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        sys.path.insert(0, os.getcwd())
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = os.path.abspath(first)
        exec(compile(Path(first).read_bytes(), main.__file__, "exec"), vars(main))


if __name__ == "__main__":
    # The script's folder is no place that a program would import from.
    del sys.path[0]
    sys.path.insert(0, str(SUPPORT.parent.parent))
    listeners = [socket.socket(fileno=int(number)) for number in sys.argv[2:]]
    Server(sys.argv[1], *listeners).serve(TORCH)
