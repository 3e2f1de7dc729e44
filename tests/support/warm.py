"""Run a script in a fork of a process that has imported torch: it starts in milliseconds.

A test of a real start (launchers, a missing package) uses `commands.run` instead. The forked
process has its own working directory, environment and output. Its `--spawn` ranks and
torchrun's ranks are forked, too (MULTIGPU_START_METHOD).
"""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.nn.parallel",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "tqdm.auto",
    "multigpu.trainer",
    "multigpu.vgpu",
    "multigpu.metrics",
    "multigpu.proof",
    "multigpu.checkpoint",
)


# ---- the client, in the process that runs the tests ----------------------------------------


class Server:
    """The warm process of this process: starts at the first request, ends with this one."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        self.preload = preload
        self.folder = tempfile.mkdtemp(prefix="warm")
        self.address = os.path.join(self.folder, "socket")
        self.process: subprocess.Popen | None = None

    def start(self, environment: dict[str, str]) -> None:
        if self.process is not None:
            return
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen(16)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), *self.preload],
            env=environment,
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
        )
        listener.close()
        atexit.register(self.stop)

    def stop(self) -> None:
        self.process.stdin.close()  # the server ends when its standard input does
        self.process.wait()
        with suppress(OSError):
            os.unlink(self.address)
            os.rmdir(self.folder)


SERVERS = {
    "torch": Server(PRELOAD),
    "tensorflow": Server((*PRELOAD, "multigpu.tf_common", "keras")),
}


def run(
    arguments: list[str],
    environment: dict[str, str],
    cwd: Path | None,
    timeout: float,
    imported: str = "torch",
) -> subprocess.CompletedProcess:
    """Run `script.py flags…`, or `torchrun flags… script.py flags…`; .stdout has stderr, too.

    After `timeout` seconds the script and its ranks are killed: subprocess.TimeoutExpired.
    `imported` names what the warm process has imported: "torch", or "tensorflow" as well.
    """
    server = SERVERS[imported]
    server.start(environment)
    with tempfile.TemporaryFile() as output, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server.address)
        request = {
            "arguments": arguments,
            "environment": environment,
            "cwd": str(cwd or os.getcwd()),
        }
        text = json.dumps(request).encode()
        socket.send_fds(connection, [len(text).to_bytes(8, "little")], [output.fileno()])
        connection.sendall(text)
        connection.settimeout(timeout)
        try:
            answer = connection.recv(8)
        except TimeoutError:
            output.seek(0)
            raise subprocess.TimeoutExpired(arguments, timeout, output.read()) from None
        output.seek(0)
        code = int.from_bytes(answer, "little", signed=True)
        return subprocess.CompletedProcess(
            arguments, code, output.read().decode(errors="replace"), ""
        )


# ---- the server ----------------------------------------------------------------------------


def serve(listener: socket.socket, preload: list[str]) -> None:
    for name in preload:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forked handlers are reaped by the kernel
    import select

    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # the tests have ended
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            handle(connection)
        connection.close()


def handle(connection: socket.socket) -> None:
    """In a fork of the server: run the script in another fork, and send its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, fds, _, _ = socket.recv_fds(connection, 8, 1)
    size, text = int.from_bytes(head, "little"), b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    request = json.loads(text)
    child = os.fork()
    if child == 0:
        os.setsid()
        connection.close()
        become(request, fds[0])
    code = wait(child, connection)
    with suppress(OSError):
        connection.sendall(code.to_bytes(8, "little", signed=True))
    os._exit(0)


def wait(child: int, connection: socket.socket) -> int:
    """The child's exit code; if the client goes away, the child's process group is killed."""
    import select

    descriptor = os.pidfd_open(child)
    ready, _, _ = select.select([descriptor, connection], [], [])
    if descriptor not in ready:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def become(request: dict, output: int) -> None:
    """Become the script: its environment, folder, output and arguments."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"], MULTIGPU_START_METHOD="fork")
    os.chdir(request["cwd"])
    arguments = request["arguments"]
    if arguments[0] == "torchrun":
        torchrun(arguments[1:])
    else:
        script(*arguments)
    sys.exit(0)


def script(path: str, *flags: str) -> None:
    sys.argv = [path, *flags]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    for entry in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if entry:
            sys.path.insert(1, entry)
    runpy.run_path(path, run_name="__main__")


def torchrun(arguments: list[str]) -> None:
    """As the command, but its agent forks the ranks instead of starting Python for each."""
    from torch.distributed import run as elastic
    from torch.distributed.launcher.api import elastic_launch

    def launch(config, entrypoint):
        config.start_method = "fork"
        # `entrypoint` is Python's path, and the first argument is -u: a fork needs neither.
        return lambda _, *rest: elastic_launch(config, rank)(*rest)

    elastic.elastic_launch = launch
    elastic.main(arguments)


def rank(path: str, *flags: str) -> None:
    """One rank under torchrun, in one more fork.

    A script ends with os._exit, and the agent waits for a return value.
    """
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        script(path, *flags)
        sys.exit(0)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code:
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
